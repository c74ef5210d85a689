"""Where recorded successes are cut, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from vla_rl.rewards.progress.segments import gripper_changes, pauses, stage_ends


def test_the_gripper_changes_where_its_sign_does() -> None:
    assert gripper_changes(np.array([1.0, 0.2, 0.0, -0.1, -1.0, 0.3])).tolist() == [3, 5]
    assert gripper_changes(np.ones(4)).tolist() == []
    assert gripper_changes(np.ones(0)).tolist() == []


def along(*moves: float) -> np.ndarray:
    """Positions on a line in the plane; each move lasts from one observation to the next."""
    at = np.concatenate([[0.0], np.cumsum(moves)])
    return np.stack([3 * at, 4 * at], axis=1)


def test_a_pause_is_slow_for_its_time() -> None:
    """The fifth move is as short as the second, but takes a quarter of the time: half the highest speed."""
    position, step = along(1, 0.05, 0, 1, 0.05, 1), np.array([0, 4, 8, 12, 16, 16 + 1, 16 + 5])
    position[-2:] += (position[4] - position[3]) * 0.075  # now the fifth move is .125: .125 a step, of .25
    assert pauses(position, step, rest=0.1).tolist() == [[4, 12]]
    assert pauses(position, step, rest=0.6).tolist() == [[4, 12], [16, 17]]
    assert pauses(position, step, rest=0.01).tolist() == [[8, 12]]


def test_what_has_not_moved_yet_does_not_pause_and_what_stops_does() -> None:
    step = np.arange(6)
    assert pauses(along(0, 0, 1, 0, 0), step, rest=0.1).tolist() == [[3, 5]]
    assert pauses(along(0, 0, 0, 0, 0), step, rest=0.1).tolist() == []
    assert pauses(along(1, 1, 1, 1, 1), step, rest=0.1).tolist() == []
    assert pauses(along()[:1], step[:1], rest=0.1).tolist() == []


@pytest.mark.parametrize(
    ("changes", "still", "expected"),
    [
        ([], [], [20]),
        ([5, 12], [], [5, 12, 20]),
        ([5], [[8, 10]], [5, 8, 20]),
        ([9], [[8, 10]], [9, 20]),  # the gripper closes while the arm waits for it
        ([], [[18, 24]], [20]),  # the arm waits for success
        ([22], [[21, 24]], [20]),  # nothing after success
        ([8], [[2, 4], [8, 10]], [2, 8, 20]),
    ],
)
def test_stages_end_at_changes_at_pauses_and_at_success(
    changes: list[int], still: list[list[int]], expected: list[int]
) -> None:
    paused = np.array(still, dtype=np.int64).reshape(-1, 2)
    assert stage_ends(np.array(changes, dtype=np.int64), paused, success=20).tolist() == expected
