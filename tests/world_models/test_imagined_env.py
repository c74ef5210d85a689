"""What an imagined world does beyond what every world has to do (tests/sims/test_conformance.py runs it too)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sims.chunk import step_chunk
from sims.vector_env import StartState
from tests import dot_world
from world_models.data.clips import ClipSampler
from world_models.data.keyframes import Beginnings, KeyframeConfig, Keyframes
from world_models.imagined_env import ImaginedConfig, ImaginedEnv
from world_models.world_model import WorldModelError

H = dot_world.HORIZON


def actions(rows: int, steps: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(rows, steps, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture
def clips(tmp_path: Path) -> ClipSampler:
    return ClipSampler([dot_world.store(tmp_path / "dots")], action_horizon=H)


def make(tmp_path: Path, **changes: object) -> ImaginedEnv:
    config = ImaginedConfig(**{"num_envs": 3, "verdict_every": 2, **changes})  # type: ignore[arg-type]
    return dot_world.imagined_env(tmp_path / "world", max_steps=40, beginnings=0.0, config=config)


def test_it_begins_at_a_recorded_look(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    obs = env.observe()
    for row in range(3):
        shown = dot_world.picture(float(obs.state[row, 0]))
        assert torch.equal(obs.images[row], torch.from_numpy(shown))


def test_verdicts_come_when_they_are_due_and_end_the_row(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.outcome.reward_threshold.fill_(-1.0)  # everything is a success
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    action = actions(3, 4)
    assert not env.step(action[:, 0]).success.any()
    step = env.step(action[:, 1])
    assert step.success.all()
    assert step.terminated.all()
    assert (step.reward == 1).all()
    standing = env.observe()
    after = env.step(action[:, 2])
    assert (after.reward == 0).all()
    assert after.success.all()
    assert torch.equal(env.observe().state, standing.state)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    assert step_chunk(env, action, 1.0).num_executed.tolist() == [2, 2, 2]


def test_failing_for_good_ends_without_reward(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.outcome.failed_threshold.fill_(-1.0)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    chunk = step_chunk(env, actions(3, 4), 1.0)
    assert chunk.terminated.all()
    assert not chunk.success.any()
    assert (chunk.reward == 0).all()


def test_a_branch_is_cut_as_a_time_out(tmp_path: Path) -> None:
    env = make(tmp_path, branch_steps=3)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    chunk = step_chunk(env, actions(3, 4), 1.0)
    assert chunk.num_executed.tolist() == [3, 3, 3]
    assert chunk.truncated.all()
    assert not chunk.terminated.any()
    assert env.spec.max_steps == 3


def test_what_the_model_cannot_imagine_is_cut_and_weighs_less(tmp_path: Path) -> None:
    env = make(tmp_path, max_error=1.0)
    env.usual_error = 1e-6  # every estimate is far above what is usual
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    chunk = step_chunk(env, actions(3, 4), 1.0)
    assert chunk.truncated.all()
    assert chunk.num_executed.tolist() == [2, 2, 2]
    assert (env.error > 1).all()
    doubtful = make(tmp_path / "penalty", error_penalty=0.5)
    doubtful.outcome.reward_threshold.fill_(-1.0)
    doubtful.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    doubtful.usual_error = float("inf")
    assert (step_chunk(doubtful, actions(3, 4), 1.0).reward == 1).all()
    doubtful.usual_error = 1e-6
    doubtful.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    assert (step_chunk(doubtful, actions(3, 4), 1.0).reward == 0).all()


def test_a_group_shares_its_noise_and_other_starts_do_not(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (5, 5, 6)])
    noise = [env._noise(row) for row in range(3)]
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    step_chunk(env, actions(1, H).expand(3, -1, -1), 1.0)
    assert not torch.equal(env._noise(0), noise[0])
    assert torch.equal(env._noise(0), env._noise(1))
    obs = env.observe()
    assert torch.equal(obs.images[0], obs.images[1])


def test_keyframes_lie_before_the_end_and_beginnings_at_the_start(clips: ClipSampler) -> None:
    near = Keyframes(clips, KeyframeConfig(beginnings=0.0, before_end=(2, 5), failures=1.0), tasks=("go",))
    for seed in range(30):
        episode, look = near.choose(StartState(task=0, seed=seed))
        left = clips.entries[episode].steps - clips.look_steps(episode)[look]
        assert 2 <= left <= 5
        assert not clips.entries[episode].success
    start = Keyframes(clips, KeyframeConfig(beginnings=1.0), tasks=("go",))
    assert all(start.choose(StartState(task=0, seed=seed))[1] == 0 for seed in range(10))
    assert near.choose(StartState(task=0, seed=4)) == near.choose(StartState(task=0, seed=4))
    with pytest.raises(WorldModelError, match="no recorded episode of task 'fly' to start from; recorded are"):
        Keyframes(clips, KeyframeConfig(), tasks=("fly",))


def test_beginnings_are_found_by_the_seed_that_was_recorded(clips: ClipSampler) -> None:
    beginnings = Beginnings(clips, tasks=("go",))
    starts = beginnings.starts(5)
    assert [start.seed for start in starts] == [entry.seed for entry in clips.entries[:5]]
    clip, elapsed = beginnings.moment(starts[3])
    assert elapsed == 0
    assert torch.equal(clip.first, clip.frames[0])
    with pytest.raises(WorldModelError, match="no recorded episode of task 0 began at seed 12345"):
        beginnings.moment(StartState(task=0, seed=12345))


def test_a_snapshot_of_another_world_is_refused(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    (state,) = env.capture([0])
    assert state.snapshot is not None
    with pytest.raises(ValueError, match="a snapshot of this world has"):
        env.reset([0], start=[StartState(task=0, seed=1, snapshot=state.snapshot[:-1])])
