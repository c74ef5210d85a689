"""The model of larger clusters, by hand-computed schedules."""

import numpy as np
import pytest

from benchmarks.scaling_model import Laws, Stages, ends, iteration_s, predictions, split, stages
from sims.errors import UserError


def constant(step: float, infer: float, learn: float, micro_batches: int = 8) -> Stages:
    step_s, infer_s, learn_s = (np.full(4, value) for value in (step, infer, learn))
    return Stages(step=step_s, infer=infer_s, sync=np.zeros(4), learn=learn_s, micro_batches=micro_batches)


def test_synchronous_rollouts_wait_for_the_slowest_and_for_the_update() -> None:
    rollout = np.array([[3.0, 1.0], [1.0, 2.0]])
    # 3 + 1 = 4; then 2 more for the slower one and 1 for the update: 7.
    assert ends(rollout, np.array([1.0, 1.0]), overlapped=False).tolist() == [4, 7]


def test_with_staleness_1_the_longer_of_both_sets_the_pace() -> None:
    rollout = np.array([[3.0], [3.0], [3.0]])
    # Rollout 1 begins at 3, with the weights of the start; rollout 2 at 6, as update 0 ended at 4.
    assert ends(rollout, np.ones(3), overlapped=True).tolist() == [4, 7, 10]
    # A slow update: rollout 2 waits for update 0 (at 6); update 2 for update 1 (at 11).
    assert ends(np.ones((3, 1)), np.full(3, 5.0), overlapped=True).tolist() == [6, 11, 16]


def test_placements_of_constant_stages() -> None:
    stages = constant(step=4.0, infer=4.0, learn=8.0)
    assert iteration_s(stages, "colocated", 1, 1, Laws()) == pytest.approx(16)
    assert iteration_s(stages, "colocated", 4, 4, Laws()) == pytest.approx(4)
    assert iteration_s(stages, "pipelined", 1, 1, Laws()) == pytest.approx(4 + 2 + 8)
    assert iteration_s(stages, "disaggregated", 1, 1, Laws()) == pytest.approx(8)
    assert iteration_s(stages, "colocated", 16, 16, Laws()) == pytest.approx(0.5 + 1)  # 8 micro-batches, one each
    assert iteration_s(stages, "colocated", 2, 2, Laws(fixed=0.5)) == pytest.approx(8 * 0.75 + 4)
    ring = Laws(gradient_s=0.5, gradients=2)  # 2 (4 - 1) / 4 * .5 s, twice
    assert iteration_s(stages, "colocated", 4, 4, ring) == pytest.approx(4 + 1.5)


def test_all_placements_are_predicted_and_none_beats_its_gpus() -> None:
    assert split(4, "disaggregated") == (3, 1) and split(1, "disaggregated") is None
    rows = predictions(constant(step=1.0, infer=2.0, learn=1.0, micro_batches=1024), Laws())
    assert len(rows) == 3 * 8 - 1
    assert all(0 < one["value"] <= 2 * int(one["name"].split()[1]) for one in rows)


def test_stage_times_are_those_of_a_run_without_its_start() -> None:
    own = {"time/simulate_s": 1.0, "time/render_s": 2.0, "time/infer_s": 4.0, "time/learn_s": 8.0, "time/sync_s": 0.5}
    cluster = {"collectors/simulate_s": 3.0, "collectors/sync_s": 0.25, "time/sync_s": 0.5, "time/learn_s": 8.0}
    alone = stages([{"time/simulate_s": 9.0}] * 2 + [own])
    assert [part.tolist() for part in (alone.step, alone.infer, alone.sync, alone.learn)] == [[3], [4], [0.5], [8]]
    there = stages([cluster] * 3)
    assert [part.tolist() for part in (there.step, there.infer, there.sync, there.learn)] == [[3], [0], [0.75], [8]]
    with pytest.raises(UserError, match="a run of 2 iterations: the model needs more than 2"):
        stages([own] * 2)
