"""Configuration to objects: the only place that dispatches on a configuration's class."""

from __future__ import annotations

import torch

from policies.denoising_policy import DenoisingPolicy, DenoisingPolicyConfig, RobotSpec
from sims.tabletop import TabletopConfig, TabletopEnv
from sims.vector_env import EnvSpec, VectorEnv

SIMULATORS = {TabletopConfig: TabletopEnv}


def make_env(config: TabletopConfig) -> VectorEnv:
    return SIMULATORS[type(config)](config)


def make_policy(config: DenoisingPolicyConfig, spec: EnvSpec, *, seed: int) -> DenoisingPolicy:
    """A freshly initialised policy for this world."""
    torch.manual_seed(seed)
    return DenoisingPolicy(config, RobotSpec.of(spec))
