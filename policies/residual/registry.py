"""What a bundle may hold: a policy of the registry, a residual on one, the best of its samples, or one with labels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from policies.policy import Policy, RobotSpec
from policies.registry import BUILT_IN, PLUGIN_GROUP
from policies.residual.best_of import BestOfPolicy, BestOfPolicyConfig
from policies.residual.conditioned import ConditionedPolicy, ConditionedPolicyConfig
from policies.residual.policy import ResidualPolicy, ResidualPolicyConfig
from sims.plugins import with_plugins

WRAPPERS = {
    ResidualPolicyConfig: ResidualPolicy,
    BestOfPolicyConfig: BestOfPolicy,
    ConditionedPolicyConfig: ConditionedPolicy,
}
BUNDLED: Mapping[type[Any], Callable[[Any, RobotSpec], Policy[Any, Any]]] = with_plugins(
    {**BUILT_IN, **WRAPPERS}, PLUGIN_GROUP
)

if TYPE_CHECKING:
    BundledConfig = Any
else:
    BundledConfig = Annotated[Union[tuple(BUNDLED)], Field(discriminator="name")]  # noqa: UP007


def build_bundled(config: BundledConfig, robot: RobotSpec) -> Policy[Any, Any]:
    """As ``build_policy``, of everything that a bundle may hold."""
    return BUNDLED[type(config)](config, robot)
