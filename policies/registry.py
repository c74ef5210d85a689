"""Every policy: configuration class to constructor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import Policy, RobotSpec

POLICIES: Mapping[type[Any], Callable[[Any, RobotSpec], Policy[Any, Any]]] = {
    DenoisingPolicyConfig: DenoisingPolicy,
}


def make_policy(config: Any, robot: RobotSpec, *, seed: int) -> Policy[Any, Any]:
    """A freshly initialized policy. ValueError where the configuration contradicts itself or the robot."""
    torch.manual_seed(seed)
    return POLICIES[type(config)](config, robot)
