"""What an imagined environment does beyond the VectorEnv interface (see tests/sims/test_conformance.py)."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from episodes.store import EpisodeStore
from sims.chunk import step_chunk
from sims.vector_env import StartState, decode_instructions
from tests import dot_episodes
from world_models.data.clip_sampler import ClipSampler
from world_models.data.keyframes import KeyframeConfig, Keyframes, RecordedStarts
from world_models.imagined_env import ImaginedEnv, ImaginedEnvConfig
from world_models.world_model import WorldModelError

H = dot_episodes.HORIZON


def actions(num_envs: int, steps: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(num_envs, steps, 2, generator=torch.Generator().manual_seed(seed)) * 2 - 1


@pytest.fixture
def clips(tmp_path: Path) -> ClipSampler:
    return ClipSampler([dot_episodes.store(tmp_path / "dots")], action_horizon=H)


def make(tmp_path: Path, **changes: object) -> ImaginedEnv:
    config = ImaginedEnvConfig(**{"num_envs": 3, "reward_every": 2, **changes})  # type: ignore[arg-type]
    return dot_episodes.imagined_env(tmp_path / "episodes", max_steps=40, episode_starts=0.0, config=config)


def test_it_starts_at_a_recorded_observation(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    obs = env.observe()
    for env_id in range(3):
        expected = dot_episodes.image_of(float(obs.state[env_id, 0]))
        assert torch.equal(obs.images[env_id], torch.from_numpy(expected))


def test_success_is_reported_when_a_reward_is_due_and_ends_the_episode(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.reward_model.reward_threshold.fill_(-1.0)  # everything is a success
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    action = actions(3, 4)
    assert not env.step(action[:, 0]).success.any()
    step = env.step(action[:, 1])
    assert step.success.all()
    assert step.terminated.all()
    assert (step.reward == 1).all()
    finished = env.observe()
    after = env.step(action[:, 2])
    assert (after.reward == 0).all()
    assert after.success.all()
    assert torch.equal(env.observe().state, finished.state)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    assert step_chunk(env, action, 1.0).num_executed.tolist() == [2, 2, 2]


def test_a_failed_episode_ends_without_reward(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.reward_model.failed_threshold.fill_(-1.0)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    chunk = step_chunk(env, actions(3, 4), 1.0)
    assert chunk.terminated.all()
    assert not chunk.success.any()
    assert (chunk.reward == 0).all()


def test_branch_steps_truncate_an_episode(tmp_path: Path) -> None:
    env = make(tmp_path, branch_steps=3)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    chunk = step_chunk(env, actions(3, 4), 1.0)
    assert chunk.num_executed.tolist() == [3, 3, 3]
    assert chunk.truncated.all()
    assert not chunk.terminated.any()
    assert env.spec.max_steps == 3


def test_uncertain_predictions_truncate_and_lower_the_reward(tmp_path: Path) -> None:
    env = make(tmp_path, max_error=1.0)
    env.reference_error = 1e-6  # every estimate is far above the reference
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    chunk = step_chunk(env, actions(3, 4), 1.0)
    assert chunk.truncated.all()
    assert chunk.num_executed.tolist() == [2, 2, 2]
    assert (env.error > 1).all()
    uncertain = make(tmp_path / "penalty", error_penalty=0.5)
    uncertain.reward_model.reward_threshold.fill_(-1.0)
    uncertain.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    uncertain.reference_error = float("inf")
    assert (step_chunk(uncertain, actions(3, 4), 1.0).reward == 1).all()
    uncertain.reference_error = 1e-6
    uncertain.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    assert (step_chunk(uncertain, actions(3, 4), 1.0).reward == 0).all()


def test_a_group_shares_its_noise_and_other_starts_do_not(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (5, 5, 6)])
    noise = [env._noise(env_id, 0) for env_id in range(3)]
    assert torch.equal(noise[0], noise[1])
    assert not torch.equal(noise[0], noise[2])
    step_chunk(env, actions(1, H).expand(3, -1, -1), 1.0)
    assert not torch.equal(env._noise(0, 1), noise[0])
    assert torch.equal(env._noise(0, 1), env._noise(1, 1))
    obs = env.observe()
    assert torch.equal(obs.images[0], obs.images[1])


def test_keyframes_are_before_the_end_or_at_an_episodes_start(clips: ClipSampler) -> None:
    near = Keyframes(clips, KeyframeConfig(episode_starts=0.0, before_end=(2, 5), failures=1.0), tasks=("go",))
    for seed in range(30):
        episode, observation = near.choose(StartState(task=0, seed=seed))
        left = clips.entries[episode].steps - clips.observation_steps(episode)[observation]
        assert 2 <= left <= 5
        assert not clips.entries[episode].success
    start = Keyframes(clips, KeyframeConfig(episode_starts=1.0), tasks=("go",))
    assert all(start.choose(StartState(task=0, seed=seed))[1] == 0 for seed in range(10))
    assert near.choose(StartState(task=0, seed=4)) == near.choose(StartState(task=0, seed=4))
    with pytest.raises(WorldModelError, match="no recorded episode of task 'fly' to start from; recorded are"):
        Keyframes(clips, KeyframeConfig(), tasks=("fly",))
    with pytest.raises(WorldModelError, match="no episode of task 'go' whose outcome is known was observed 40 to 60"):
        Keyframes(clips, KeyframeConfig(episode_starts=0.0, before_end=(40, 60)), tasks=("go",))
    Keyframes(clips, KeyframeConfig(episode_starts=1.0, before_end=(40, 60)), tasks=("go",))


def test_keyframes_are_before_a_labelled_success(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    id = store.add(dot_episodes.episode(0, steps=12))
    store.label(id, "success", True, author="anna")
    store.label(id, "success_from", 6, author="anna")
    clips = ClipSampler([store], action_horizon=H)
    near = Keyframes(clips, KeyframeConfig(episode_starts=0.0, before_end=(1, 3)), tasks=("go",))
    assert {near.choose(StartState(task=0, seed=seed))[1] for seed in range(30)} == {3, 4, 5}


def test_an_unknown_outcome_is_no_failure_to_start_near(tmp_path: Path) -> None:
    store = dot_episodes.store(tmp_path, 24)
    aborted = {entry.seed for entry in store.select() if entry.success}
    for entry in store.select():
        if entry.seed in aborted:
            store.label(entry.id, "outcome", "abort", author="anna")
    clips = ClipSampler([store], action_horizon=H)
    near = Keyframes(clips, KeyframeConfig(episode_starts=0.0, before_end=(1, 9)), tasks=("go",))
    chosen = {clips.entries[near.choose(StartState(task=0, seed=seed))[0]].seed for seed in range(200)}
    assert chosen
    assert not chosen & aborted


def test_every_recorded_start_is_found_whatever_seeds_were_recorded(tmp_path: Path) -> None:
    """Two imported stores both number their episodes from 0, and the parts of an episode have its seed."""
    stores = [dot_episodes.store(tmp_path / name, 12) for name in ("first", "second")]
    stores[0].split(stores[0].entries()[0].id, 2, author="anna")
    clips = ClipSampler(stores, action_horizon=H)
    recorded = RecordedStarts(clips, range(len(clips.entries)), tasks=("go",))
    starts = recorded.starts(100)
    assert len(set(starts)) == len(clips.entries) == 25
    for episode, start in enumerate(starts):
        clip, elapsed = recorded.clip(start)
        assert elapsed == 0
        assert torch.equal(clip.first, clip.frames[0])
        assert torch.equal(clip.state[0], clips.clip(episode, 0, 0).state[0])
    with pytest.raises(WorldModelError, match="no recorded episode 12345 of task 0"):
        recorded.clip(StartState(task=0, seed=12345))
    with pytest.raises(WorldModelError, match="no recorded episode of fly to start from, or none begins where its"):
        RecordedStarts(clips, range(25), tasks=("fly",))


def test_starts_are_of_every_task_in_turn(tmp_path: Path) -> None:
    """Also where the stores of the tasks come one after the other, and until a task has no more."""
    stores = [EpisodeStore(tmp_path / task, create=True) for task in ("reach", "pick")]
    for store, count in zip(stores, (6, 2), strict=True):
        store.add_all(dataclasses.replace(dot_episodes.episode(seed), task=store.path.name) for seed in range(count))
    recorded = RecordedStarts(ClipSampler(stores, action_horizon=H), range(8), tasks=("reach", "pick"))
    assert [start.seed for start in recorded.starts(6)] == [0, 6, 1, 7, 2, 3]
    assert [start.task for start in recorded.starts(6)] == [0, 1, 0, 1, 0, 0]


def test_an_episode_goes_on_in_the_middle_of_a_chunk_exactly(tmp_path: Path) -> None:
    """From a snapshot with what was predicted last, whichever environments that was predicted with."""
    config, action = ImaginedEnvConfig(num_envs=16, reward_every=2), actions(16, 16)
    env, other = (dot_episodes.imagined_env(tmp_path / name, max_steps=100, config=config) for name in ("a", "b"))
    for one in (env, other):
        torch.manual_seed(5)
        for weight in one.model.parameters():
            weight.data += 0.02 * torch.randn_like(weight) if weight.dim() > 1 else 0.0
    env.reset(start=[StartState(task=0, seed=seed) for seed in range(16)])
    for step in range(2):
        env.step(action[:, step])
    third = list(range(0, 16, 3))
    env.reset(third, start=[StartState(task=0, seed=100 + seed) for seed in third])
    for step in range(2, 4):
        env.step(action[:, step])
    other.reset(start=env.capture())
    for step in range(4, 12):
        here, there = env.observe(), other.observe()
        assert torch.equal(here.state, there.state)
        assert torch.equal(here.images, there.images)
        env.step(action[:, step])
        other.step(action[:, step])
        assert torch.equal(env.error, other.error)


def test_a_snapshot_of_another_size_is_refused(tmp_path: Path) -> None:
    env = make(tmp_path)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    (state,) = env.capture([0])
    assert state.snapshot is not None
    with pytest.raises(ValueError, match="a snapshot of this environment has"):
        env.reset([0], start=[StartState(task=0, seed=1, snapshot=state.snapshot[:-1])])


def test_instructions_of_any_length_are_observed_and_captured(tmp_path: Path) -> None:
    instruction = "go right, " * 20
    env = dot_episodes.imagined_env(tmp_path / "episodes", max_steps=40, instruction=instruction)
    env.reset(start=[StartState(task=0, seed=seed) for seed in (1, 2, 3)])
    states = env.capture()
    env.reset(start=states[::-1])
    assert decode_instructions(env.observe().instruction) == [instruction] * 3
