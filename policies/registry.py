"""Every policy: configuration class to constructor. Other distributions add theirs (sims/plugins.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from policies.categorical import CategoricalPolicy, CategoricalPolicyConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import Policy, RobotSpec
from sims.plugins import with_plugins

BUILT_IN: Mapping[type[Any], Callable[[Any, RobotSpec], Policy[Any, Any]]] = {
    DenoisingPolicyConfig: DenoisingPolicy,
    CategoricalPolicyConfig: CategoricalPolicy,
    GaussianPolicyConfig: GaussianPolicy,
}
POLICIES: Mapping[type[Any], Callable[[Any, RobotSpec], Policy[Any, Any]]] = with_plugins(BUILT_IN, "vla_rl.policies")

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
