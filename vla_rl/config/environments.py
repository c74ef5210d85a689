"""Every environment that a run can be configured with: simulators and robots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from real_robot.registry import ENVIRONMENTS as ROBOTS
from sims.registry import CONSTRUCTORS
from sims.vector_env import VectorEnv

ENVIRONMENTS: Mapping[type[Any], Callable[[Any], VectorEnv]] = {**CONSTRUCTORS, **ROBOTS}

if TYPE_CHECKING:
    EnvironmentConfig = Any
else:
    EnvironmentConfig = Annotated[Union[tuple(ENVIRONMENTS)], Field(discriminator="name")]  # noqa: UP007


def make_env(config: EnvironmentConfig) -> VectorEnv:
    """Raises UserError where the simulator or the robot's software is not installed, or its settings are wrong."""
    return ENVIRONMENTS[type(config)](config)


def make_shard_env(config: EnvironmentConfig, count: int) -> VectorEnv:
    """One of ``count`` equal parts of the environment that ``config`` describes."""
    return make_env(dataclasses.replace(config, num_envs=config.num_envs // count))
