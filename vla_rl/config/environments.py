"""Every environment that a run can be configured with: simulators and robots."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, Union

from pydantic import Field

from real_robot.registry import ENVIRONMENTS as ROBOTS
from sims.errors import UserError
from sims.plugins import with_plugins
from sims.registry import BUILT_IN, PLUGIN_GROUP
from sims.vector_env import VectorEnv


@dataclass(frozen=True, kw_only=True)
class NoSimulatorConfig:
    """No simulator: what is learned is learned from recorded episodes (docs/world-models.md, "Logs alone")."""

    name: Literal["none"] = "none"


def _refuse(config: NoSimulatorConfig) -> NoReturn:
    raise UserError("sim.name is none, and this needs a simulator: name one in section sim (for eval: --sim CONFIG)")


ENVIRONMENTS: Mapping[type[Any], Callable[[Any], VectorEnv]] = with_plugins(
    {**BUILT_IN, **ROBOTS, NoSimulatorConfig: _refuse}, PLUGIN_GROUP
)

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
