"""Every reward: configuration class to constructor. Other distributions add theirs (sims/plugins.py).

A constructor takes the configuration, an environment and the run's device, and returns the environment that is trained
in. Evaluation and validation happen in the environment itself, whatever the reward.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Field

from policies.device import Device
from sims.plugins import with_plugins
from sims.vector_env import VectorEnv
from vla_rl.rewards.bundle import CLASSIFIER, fitted_sha256, load_progress_model, load_reward_model
from vla_rl.rewards.classified_env import ClassifiedEnv
from vla_rl.rewards.progress.env import PaidProgressConfig, Progress, ProgressEnv
from vla_rl.rewards.progress.zero_shot import AnswerProgress, AnswerRewardConfig, ClipProgress, ClipRewardConfig
from vla_rl.rewards.published_model import published_sha256


@dataclass(frozen=True, kw_only=True)
class OutcomeConfig:
    """The environment's own reward, success and end of an episode."""

    name: Literal["outcome"] = "outcome"


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """A success classifier decides (docs/rewards.md). ``path``: the folder that ``vla-rl reward fit`` left."""

    name: Literal["classifier"] = "classifier"
    path: Path


@dataclass(frozen=True, kw_only=True)
class ProgressRewardConfig(PaidProgressConfig):
    """Pays for the change of progress (docs/rewards.md).

    ``path``: the folder that ``vla-rl reward fit-progress`` or ``fit-preferences`` left.
    """

    name: Literal["progress"] = "progress"
    path: Path


def _outcome(config: OutcomeConfig, env: VectorEnv, device: Device) -> VectorEnv:
    return env


def _classifier(config: ClassifierConfig, env: VectorEnv, device: Device) -> VectorEnv:
    return ClassifiedEnv(env, load_reward_model(CLASSIFIER, config.path, device))


def _fitted(config: ProgressRewardConfig, device: Device) -> Progress:
    return load_progress_model(config.path, device)


PROGRESS_MODELS: Mapping[type[Any], Callable[[Any, Device], Progress]] = {
    ProgressRewardConfig: _fitted,
    ClipRewardConfig: ClipProgress,
    AnswerRewardConfig: AnswerProgress,
}


def _progress(config: Any, env: VectorEnv, device: Device) -> VectorEnv:
    return ProgressEnv(env, PROGRESS_MODELS[type(config)](config, device), config)


BUILT_IN: Mapping[type[Any], Callable[[Any, VectorEnv, Device], VectorEnv]] = {
    OutcomeConfig: _outcome,
    ClassifierConfig: _classifier,
    **dict.fromkeys(PROGRESS_MODELS, _progress),
}
REWARDS: Mapping[type[Any], Callable[[Any, VectorEnv, Device], VectorEnv]] = with_plugins(BUILT_IN, "vla_rl.rewards")

if TYPE_CHECKING:
    RewardConfig = Any
else:
    RewardConfig = Annotated[Union[tuple(REWARDS)], Field(discriminator="name")]  # noqa: UP007


def with_reward(config: RewardConfig, env: VectorEnv, device: Device) -> VectorEnv:
    """``env`` with this reward. Raises UserError where it does not fit the environment."""
    return REWARDS[type(config)](config, env, device)


def reward_sha256(config: RewardConfig) -> str | None:
    """Of the model that the reward reads; None where it reads none, or is of another distribution."""
    match config:
        case ClassifierConfig() | ProgressRewardConfig():
            return fitted_sha256(config.path)
        case ClipRewardConfig() | AnswerRewardConfig():
            return published_sha256(config.path)
    return None
