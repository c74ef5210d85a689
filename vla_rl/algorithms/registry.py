"""Every algorithm: configuration class to constructor. Other distributions add theirs (sims/plugins.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from policies.policy import Policy
from sims.plugins import with_plugins
from sims.vector_env import VectorEnv
from vla_rl.algorithms.algorithm import Algorithm
from vla_rl.algorithms.grpo import GRPO, GRPOConfig
from vla_rl.algorithms.off_policy import OffPolicy, OffPolicyConfig
from vla_rl.algorithms.ppo import PPO, PPOConfig

BUILT_IN: Mapping[type[Any], Callable[..., Algorithm]] = {
    PPOConfig: PPO,
    GRPOConfig: GRPO,
    OffPolicyConfig: OffPolicy,
}
ALGORITHMS: Mapping[type[Any], Callable[..., Algorithm]] = with_plugins(BUILT_IN, "vla_rl.algorithms")

if TYPE_CHECKING:
    AnyAlgorithmConfig = Any
else:
    AnyAlgorithmConfig = Annotated[Union[tuple(ALGORITHMS)], Field(discriminator="name")]  # noqa: UP007


def build_algorithm(config: AnyAlgorithmConfig, policy: Policy, env: VectorEnv, *, seed: int) -> Algorithm:
    """Ready to iterate: an episode has begun in every environment."""
    policy.prepare_to_explore()
    return ALGORITHMS[type(config)](config, policy, env, seed=seed)
