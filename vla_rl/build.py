"""Configuration to policy; sims/registry.py does the same for simulators."""

from __future__ import annotations

import torch

from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig, RobotSpec
from sims.vector_env import EnvSpec


def make_policy(config: DenoisingPolicyConfig, spec: EnvSpec, *, seed: int) -> DenoisingPolicy:
    """A freshly initialized policy for this world."""
    torch.manual_seed(seed)
    return DenoisingPolicy(config, RobotSpec.of(spec))
