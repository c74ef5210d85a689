"""Configuration to policy; sims/catalog.py does the same for simulators."""

from __future__ import annotations

import torch

from policies.denoising_policy import DenoisingPolicy, DenoisingPolicyConfig, RobotSpec
from sims.vector_env import EnvSpec


def make_policy(config: DenoisingPolicyConfig, spec: EnvSpec, *, seed: int) -> DenoisingPolicy:
    """A freshly initialised policy for this world."""
    torch.manual_seed(seed)
    return DenoisingPolicy(config, RobotSpec.of(spec))
