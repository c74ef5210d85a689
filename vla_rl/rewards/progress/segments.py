"""Where a recorded success is cut into stages: where the gripper opens or closes, and where the end effector pauses.

Both rules are of VLA-RL (Lu et al. 2025, arXiv:2505.18719, Sec. 3.4, "Autonomous Pseudo Reward Label Generation"),
which states no thresholds: segments end at "significant changes in gripper openness", and in each of them keyframes
are where the end effector's "velocity approaches zero". Here the sign of the gripper's action says whether it is open,
and a pause is slower than a share of the episode's highest speed.

    speed    high, rest, high, rest          pauses of the end effector
    gripper  open                 | closed   it closes within the second pause: one stage end, not two
    ends           |              |       |  the last one with success
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def gripper_changes(action: Float[np.ndarray, " T"]) -> Int[np.ndarray, " changes"]:
    """Control steps of the first actions with another sign than the one before; below 0 is one side, 0 the other."""
    below = action < 0
    return np.flatnonzero(below[1:] != below[:-1]) + 1


def pauses(
    position: Float[np.ndarray, "L D"], step: Int[np.ndarray, " L"], *, rest: float
) -> Int[np.ndarray, "pauses 2"]:
    """First and last control step of each pause: between its observations the speed is below ``rest`` x the highest.

    ``position``: of the end effector at the observations, which were made at the increasing control steps ``step``.
    Before it has moved there is no pause; one that is shorter than the time between observations is not seen.
    """
    speed = np.linalg.norm(np.diff(position, axis=0), axis=1) / np.diff(step)
    slow = speed < rest * speed.max(initial=0)
    change = np.diff(np.concatenate([[False], slow, [False]]).astype(np.int64))
    first, last = np.flatnonzero(change == 1), np.flatnonzero(change == -1)
    return np.stack([step[first], step[last]], axis=1)[first > 0]


def stage_ends(
    changes: Int[np.ndarray, " changes"], pauses: Int[np.ndarray, "pauses 2"], *, success: int
) -> Int[np.ndarray, " stages"]:
    """Control steps, increasing, up to ``success``: the gripper's changes, the starts of pauses, and success itself.

    A pause within which the gripper changes, or success comes, ends no stage of its own.
    """
    others = np.append(changes[changes < success], success)
    contains = ((pauses[:, :1] <= others) & (others <= pauses[:, 1:])).any(axis=1)
    return np.unique(np.concatenate([others, pauses[~contains & (pauses[:, 0] < success), 0]]))
