"""The kinds of world models, and the one place where a configuration becomes a model."""

from __future__ import annotations

from policies.denoising.policy import RobotSpec
from world_models.models.conv_flow import ConvFlow, ConvFlowConfig
from world_models.models.flow_model import FlowWorld
from world_models.models.latent_dit import LatentDiT, LatentDiTConfig
from world_models.models.wan import WanConfig, WanWorld

WorldConfig = ConvFlowConfig | LatentDiTConfig | WanConfig


def build_world(config: WorldConfig, robot: RobotSpec) -> FlowWorld:
    """Untrained, for this robot. WorldModelError if the robot's pictures do not fit the kind."""
    worlds = {ConvFlowConfig: ConvFlow, LatentDiTConfig: LatentDiT, WanConfig: WanWorld}
    return worlds[type(config)](config, robot)
