"""Rules of evaluation, of imagined episodes and of labels, by models that predict states exactly."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from episodes.store import EpisodeStore
from sims.chunk import step_chunk
from sims.numbers.statistics import THRESHOLD_LIMITS
from sims.vector_env import StartState
from tests import dot_episodes
from world_models.data.clip import SUCCESS
from world_models.data.clip_sampler import ClipSampler
from world_models.data.keyframes import ImaginedStarts, KeyframeConfig, Keyframes, RecordedStarts
from world_models.evaluation.action_sequences import EXTRA_STEPS, ActionSequence, execute
from world_models.evaluation.imagined_success import (
    ImaginedOutcomes,
    imagined_success,
    recorded_scores,
    set_thresholds,
)
from world_models.evaluation.open_loop import open_loop_errors
from world_models.imagined_env import ImaginedEnv, ImaginedEnvConfig
from world_models.models.conv_flow import ConvFlow
from world_models.reward_model import RewardModel
from world_models.training.reward_model import imagine_observations

H = dot_episodes.HORIZON
Models = tuple[ConvFlow, RewardModel]


@pytest.fixture
def models() -> Models:
    return dot_episodes.exact_models()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    """Episode i starts at 5 + i; 12 is the right edge, 1 the left one."""
    return ClipSampler([dot_episodes.store(tmp_path_factory.mktemp("dots") / "store", 4)], action_horizon=H)


def moves(*sideways: float) -> torch.Tensor:
    """[steps, 2], of 2 pixels per unit."""
    return torch.tensor([(one, 0.0) for one in sideways])


def from_five(*sideways: float) -> ActionSequence:
    return ActionSequence(episode=0, action=moves(*sideways))


def imagined(models: Models, clips: ClipSampler, *sequences: ActionSequence, every: int) -> ImaginedOutcomes:
    return imagined_success(*models, clips, sequences, seed=0, reward_every=every)


def env_of(models: Models, starts: ImaginedStarts, *, limit: int = 100, **changes: object) -> ImaginedEnv:
    config = ImaginedEnvConfig(**{"num_envs": 2, "reward_every": 1, **changes})  # type: ignore[arg-type]
    return ImaginedEnv(config, *models, starts, limits=[limit], reference_error=1.0, fingerprint="exact")


# -- sequences -----------------------------------------------------------------------------------------------------


IN_TIME, TOO_LATE = (0.36, 0.36), (0.32, 0.32)  # repeated: beyond the right edge after 10 and after 11 steps


def test_the_end_of_a_sequence_is_its_own_and_not_that_of_the_longest_beside_it(
    models: Models, clips: ClipSampler
) -> None:
    """What comes more than EXTRA_STEPS after it is no success, in imagination and where sequences are executed."""
    sequences = from_five(*IN_TIME), from_five(*TOO_LATE), from_five(*[0.0] * 20)
    assert len(IN_TIME) + EXTRA_STEPS == len(TOO_LATE) + EXTRA_STEPS == 10
    found = imagined(models, clips, *sequences, every=2)
    assert found.success.tolist() == [True, False, False]
    assert (found.score > 0.5).tolist() == [True, False, False]
    env = env_of(models, RecordedStarts(clips, range(4), tasks=("go",)), num_envs=3)
    assert execute(env, clips, sequences).success.tolist() == [True, False, False]


def test_what_failed_succeeds_no_more(models: Models, clips: ClipSampler) -> None:
    """Over the left edge, and back over the whole image to beyond the right one."""
    back = from_five(-1, -1, -1, *[1.0] * 9)
    found = imagined(models, clips, back, every=1)
    assert found.success.tolist() == [False]
    assert found.score.item() < 0.01
    assert imagined(models, clips, from_five(*[1.0] * 9), every=1).success.tolist() == [True]


def test_a_chunk_goes_on_from_its_own_end_where_a_sequence_ends_within_it(models: Models, clips: ClipSampler) -> None:
    """Classified after its 5 steps, and then after 8 and 12, of which only 12 lead beyond the right edge."""
    found = imagined(models, clips, from_five(*[0.3] * 5), every=4)
    assert found.success.tolist() == [True]
    assert (found.curve[0] > 0.5).tolist() == [False] * 8 + [True] * 5


def test_what_was_recorded_scores_nothing_after_it_failed(models: Models, tmp_path: Path) -> None:
    positions = [5.0, 3.0, -1.0, 6.0, 13.0]
    store = EpisodeStore(tmp_path, create=True)
    for seed, states in enumerate((positions, positions[:3])):
        recorded = dot_episodes.episode(seed, steps=len(states) - 1)
        assert recorded.num_steps == len(states) - 1
        state = np.array([(position, 0.0) for position in states], dtype=np.float32)
        store.add(dataclasses.replace(recorded, state=state))
    clips = ClipSampler([store], action_horizon=H)
    sequences = [ActionSequence(episode=i, action=clips.actions(i)) for i in range(2)]
    _, reward_model = models
    back, gone = recorded_scores(reward_model, clips, sequences, reward_every=1)
    assert back[-1] == gone[-1] < 0.01


def test_objects_that_hardly_moved_are_not_compared(models: Models, tmp_path: Path) -> None:
    """Those that moved by a centimeter or not at all, of four."""
    store = EpisodeStore(tmp_path, create=True)
    for seed, pixels in enumerate((0, 1, 3, 6)):
        recorded = dot_episodes.episode(seed, steps=H)
        images = np.stack([dot_episodes.image_of(one) for one in np.linspace(5, 5 + pixels, H + 1)])
        store.add(dataclasses.replace(recorded, images={"front": images[:, 0], "flipped": images[:, 1]}))
    clips, (world, _) = ClipSampler([store], action_horizon=H), models
    (row,) = open_loop_errors(world, clips, horizons=(1,), locate=dot_episodes.locate, seed=0)
    assert row["object_error_m_count"] == row["copy_object_error_m_count"] == 2
    assert row["copy_object_error_m"] == pytest.approx((0.03 + 0.06) / 2, abs=1e-6)


def test_a_reward_is_never_easier_than_an_estimate(models: Models, clips: ClipSampler) -> None:
    """Also where every failure may be rewarded, so that none of their scores bounds it."""
    world, reward_model = models
    with torch.no_grad():
        for part in (reward_model.head[-1].weight, reward_model.head[-1].bias):
            part.div_(40)
        reward_model.head[-1].bias[SUCCESS] += 1  # failures score between the limits of thresholds
    reward_model.config = dataclasses.replace(reward_model.config, false_success=1.0)
    thresholds = set_thresholds(world, reward_model, clips, seed=0, reward_every=1)
    assert thresholds["reward_threshold"] == thresholds["success_threshold"] > THRESHOLD_LIMITS[0]
    assert torch.equal(reward_model.reward_threshold, reward_model.success_threshold)


# -- labels --------------------------------------------------------------------------------------------------------


def test_the_observation_that_decides_an_episode_is_not_predicted_as_running(models: Models, tmp_path: Path) -> None:
    """All steps before it are."""
    store = EpisodeStore(tmp_path, create=True)
    store.add_all(dot_episodes.episode(seed, drift=0.9) for seed in range(12))
    clips, (world, reward_model) = ClipSampler([store], action_horizon=H), models
    assert all(entry.success for entry in clips.entries)
    labeled = imagine_observations(world, clips, reward_model.config, count=64, seed=0)
    position = labeled.state[:, 0]
    assert (position[labeled.status == SUCCESS] > 12.01).all()
    assert (position[labeled.before_end] < 12.01).all()
    last = [float(clips.clip(i, entry.steps - 1, 0).state[0, 0]) for i, entry in enumerate(clips.entries)]
    assert any(torch.isclose(position[labeled.before_end], torch.tensor(one)).any() for one in last)


# -- imagined episodes ---------------------------------------------------------------------------------------------


def test_an_episode_is_truncated_at_its_tasks_limit_and_no_branch_outlives_it(
    models: Models, clips: ClipSampler
) -> None:
    """Steps that were recorded before its start count towards the limit, towards the branch they do not; and an
    episode that starts at the limit takes one step."""
    keyframes = Keyframes(clips, KeyframeConfig(episode_starts=0.2, before_end=(1, 14)), tasks=("go",))
    starts = [StartState(task=0, seed=seed) for seed in range(20)]
    elapsed = [keyframes.clip(start)[1] for start in starts]
    assert min(elapsed) == 0
    assert max(elapsed) > 7
    for branch in (None, 3):
        env = env_of(models, keyframes, limit=7, num_envs=20, branch_steps=branch)
        env.reset(start=starts)
        truncated = torch.stack([env.step(torch.zeros(20, 2)).truncated for _ in range(8)])
        assert (1 + (~truncated).sum(0)).tolist() == [max(1, min(7 - past, branch or 7)) for past in elapsed]


def test_the_largest_error_of_an_episode_lowers_its_reward(models: Models, clips: ClipSampler) -> None:
    """Three times the reference in its first two steps, and none when it succeeds."""
    world, _ = models
    env = env_of(models, RecordedStarts(clips, range(4), tasks=("go",)), reward_every=2, error_penalty=0.25)
    env.reset(start=[StartState(task=0, seed=0), StartState(task=0, seed=3)])
    last = world.error[-1]
    torch.nn.init.zeros_(last.weight)
    torch.nn.init.constant_(last.bias, 2 * math.log(3))
    assert (step_chunk(env, moves(0.5, 0.5).expand(2, -1, -1), 1.0).reward == 0).all()
    torch.nn.init.constant_(last.bias, 2 * math.log(0.1))
    chunk = step_chunk(env, moves(1, 1).expand(2, -1, -1), 1.0)
    assert chunk.success.tolist() == [False, True]
    assert env.error.tolist() == pytest.approx([3, 3])
    assert chunk.reward.tolist() == pytest.approx([0, 0.5])


def test_actions_beyond_the_range_are_those_at_its_ends(models: Models, clips: ClipSampler) -> None:
    env = env_of(models, RecordedStarts(clips, range(4), tasks=("go",)))
    env.reset(start=[StartState(task=0, seed=0), StartState(task=0, seed=3)])
    env.step(torch.tensor([[5.0, 0.0], [-5.0, 0.0]]))
    assert env.observe().state[:, 0].tolist() == pytest.approx([5 + 2, 8 - 2])
