"""Every policy: configuration class to constructor. Other distributions add theirs (sims/plugins.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from policies.categorical import CategoricalPolicy, CategoricalPolicyConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import Policy, RobotSpec
from policies.pretrained.diffusion_policy.config import DiffusionPolicyConfig
from policies.pretrained.diffusion_policy.policy import DiffusionChunkPolicy
from policies.pretrained.openvla.config import OpenVLAConfig
from policies.pretrained.openvla.policy import OpenVLAPolicy
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.pi0.policy import Pi0
from policies.pretrained.smolvla.config import SmolVLAConfig
from policies.pretrained.smolvla.policy import SmolVLAPolicy
from sims.plugins import with_plugins

PLUGIN_GROUP = "vla_rl.policies"
BUILT_IN: Mapping[type[Any], Callable[[Any, RobotSpec], Policy[Any, Any]]] = {
    DenoisingPolicyConfig: DenoisingPolicy,
    CategoricalPolicyConfig: CategoricalPolicy,
    GaussianPolicyConfig: GaussianPolicy,
    Pi0Config: Pi0,
    SmolVLAConfig: SmolVLAPolicy,
    DiffusionPolicyConfig: DiffusionChunkPolicy,
    OpenVLAConfig: OpenVLAPolicy,
}
POLICIES: Mapping[type[Any], Callable[[Any, RobotSpec], Policy[Any, Any]]] = with_plugins(BUILT_IN, PLUGIN_GROUP)

DEFAULT_POLICY = DenoisingPolicyConfig

if TYPE_CHECKING:
    PolicyConfig = Any
else:
    PolicyConfig = Annotated[Union[tuple(POLICIES)], Field(discriminator="name")]  # noqa: UP007


def build_policy(config: PolicyConfig, robot: RobotSpec) -> Policy[Any, Any]:
    """A freshly initialized policy, from torch's global random state.

    ValueError where the configuration contradicts itself or the robot.
    """
    return POLICIES[type(config)](config, robot)
