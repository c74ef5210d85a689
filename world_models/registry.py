"""Every world model: configuration class to constructor, and the configuration's type.

A constructor takes its configuration and a RobotSpec and returns an untrained FlowWorldModel. Other distributions
register theirs in the entry-point group "vla_rl.world_models" (sims/plugins.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from policies.policy import RobotSpec
from sims.plugins import with_plugins
from world_models.models.conv_flow import ConvFlow, ConvFlowConfig
from world_models.models.flow_model import FlowWorldModel
from world_models.models.latent_dit import LatentDiT, LatentDiTConfig
from world_models.models.wan import WanConfig, WanWorldModel

PLUGIN_GROUP = "vla_rl.world_models"
BUILT_IN: Mapping[type[Any], Callable[[Any, RobotSpec], FlowWorldModel[Any]]] = {
    ConvFlowConfig: ConvFlow,
    LatentDiTConfig: LatentDiT,
    WanConfig: WanWorldModel,
}
WORLD_MODELS: Mapping[type[Any], Callable[[Any, RobotSpec], FlowWorldModel[Any]]] = with_plugins(BUILT_IN, PLUGIN_GROUP)

if TYPE_CHECKING:
    DynamicsConfig = Any
else:
    DynamicsConfig = Annotated[Union[tuple(WORLD_MODELS)], Field(discriminator="name")]  # noqa: UP007


def build_world_model(config: DynamicsConfig, robot: RobotSpec) -> FlowWorldModel[Any]:
    """An untrained model for this robot, from torch's global random state.

    WorldModelError if the robot's images do not fit the configuration.
    """
    return WORLD_MODELS[type(config)](config, robot)
