"""The evaluation notices recordings that do not tell the truth."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from episodes.schema import Episode
from episodes.store import EpisodeStore
from tests import dot_episodes
from tests.dot_episodes import finish
from vla_rl.config.imagination import EvaluationThresholds
from vla_rl.runners.imagination import missed
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.evaluate import WorldModelEvaluation
from world_models.evaluation.imagined_success import set_thresholds
from world_models.models.conv_flow import ConvFlow
from world_models.reward_model import RewardModel
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig
from world_models.training.kinematics import KinematicsFit
from world_models.training.reward_model import RewardModelFit, imagine_observations, set_failed_threshold

Fitted = tuple[ConvFlow, RewardModel]
FITTED, HELD_OUT = 240, 60  # episodes
EVERY = 2  # control steps between classifications
THRESHOLDS = EvaluationThresholds(max_hallucinated=1.0)  # here the actions of any success succeed from any start


def clips_of(folder: Path, change: Callable[[Episode], Episode], seeds: range) -> ClipSampler:
    """``change``d episodes in which the second camera faces the first one: it sees left what that sees right."""
    store = EpisodeStore(folder, create=True)
    drift = (0.6, -0.6, 0.1)
    store.add_all(change(facing_cameras(dot_episodes.episode(seed, drift=drift[seed % 3]))) for seed in seeds)
    return ClipSampler([store], action_horizon=dot_episodes.HORIZON)


def facing_cameras(episode: Episode) -> Episode:
    front = episode.images["front"]
    return dataclasses.replace(episode, images={"front": front, "flipped": front[:, :, ::-1]})


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """A world model and a reward model of truthful recordings."""
    folder = tmp_path_factory.mktemp("fit")
    clips = clips_of(folder / "fit", lambda episode: episode, range(FITTED))
    calibration = clips_of(folder / "calibration", lambda episode: episode, range(FITTED, FITTED + 60))
    dynamics, reward_model = dot_episodes.models()
    dynamics.fit_scales(*clips.statistics())
    finish(KinematicsFit(dynamics, clips, seed=0, steps=400))
    config = DynamicsFitConfig(steps=300, batch_size=16, learning_rate=3e-3, warmup=20)
    finish(DynamicsFit(dynamics, config, clips, seed=0))
    reward_model.normalizer.load_state_dict(dynamics.normalizer.state_dict())
    reward_model.config = dataclasses.replace(reward_model.config, steps=150)
    imagined = imagine_observations(dynamics, clips, reward_model.config, count=200, seed=0)
    finish(RewardModelFit(reward_model, clips, imagined, seed=0))
    set_failed_threshold(
        reward_model, imagine_observations(dynamics, calibration, reward_model.config, count=100, seed=1)
    )
    set_thresholds(dynamics, reward_model, calibration, seed=0, reward_every=EVERY)
    return dynamics, reward_model


def report(fitted: Fitted, clips: ClipSampler) -> dict[str, Any]:
    dynamics, reward_model = fitted
    evaluation = WorldModelEvaluation(reward_model=reward_model, clips=clips, reward_every=EVERY, seed=0)
    return evaluation.report(dynamics, env=None, no_action=None, locate=None, horizons=(1, 2), swaps=16)


def wrong_actions(episode: Episode) -> Episode:
    """Drawn at random."""
    other = np.random.default_rng(episode.seed + 1).uniform(-1, 1, episode.action.shape)
    return dataclasses.replace(episode, action=other.astype(np.float32))


def delayed_frames(episode: Episode) -> Episode:
    """Three control steps late; the first frames are repeated."""
    late = np.maximum(np.arange(len(episode.state)) - 3, 0)
    return dataclasses.replace(episode, images={name: frames[late] for name, frames in episode.images.items()})


def exchanged_cameras(episode: Episode) -> Episode:
    """The images of each camera are recorded as those of the other."""
    front, flipped = episode.images.values()
    return dataclasses.replace(episode, images={"front": flipped, "flipped": front})


def swapped_outcomes(episode: Episode) -> Episode:
    """Successes are recorded as failures, and the other way round."""
    last = np.arange(episode.num_steps) == episode.num_steps - 1
    won = last & ~np.bool_(episode.succeeded)
    return dataclasses.replace(episode, success=won, terminated=last, truncated=np.zeros_like(last))


@pytest.mark.slow
def test_a_truthful_recording_passes(fitted: Fitted, tmp_path: Path) -> None:
    found = report(fitted, clips_of(tmp_path / "held_out", lambda episode: episode, range(1000, 1000 + HELD_OUT)))
    assert missed(found, THRESHOLDS) == []
    assert found["psnr"][0] > found["copy_psnr"][0] + 3


@pytest.mark.slow
@pytest.mark.parametrize("change", [wrong_actions, delayed_frames, exchanged_cameras, swapped_outcomes])
def test_a_false_recording_misses_a_threshold(
    fitted: Fitted, tmp_path: Path, change: Callable[[Episode], Episode]
) -> None:
    found = report(fitted, clips_of(tmp_path / "held_out", change, range(1000, 1000 + HELD_OUT)))
    assert missed(found, THRESHOLDS), {name: found[name] for name in ("success_auc", "psnr", "copy_psnr")}
