"""Every algorithm: configuration class to constructor. Other distributions add theirs (sims/plugins.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any, Union

from pydantic import Field

from policies.policy import Policy
from sims.errors import UserError
from sims.plugins import with_plugins
from sims.vector_env import VectorEnv
from vla_rl.algorithms.algorithm import Algorithm
from vla_rl.algorithms.grpo import GRPO, GRPOConfig
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.off_policy_settings import OffPolicyConfig
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.rollouts.sharded import MakeRollouts

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


def build_algorithm(
    config: AnyAlgorithmConfig,
    policy: Policy,
    env: VectorEnv,
    *,
    seed: int,
    make_rollouts: MakeRollouts | None = None,
) -> Algorithm:
    """Ready to iterate. ``make_rollouts``: where rollouts come from; default: one Collector in ``env``.

    UserError where the algorithm, one of another distribution, takes no such argument.
    """
    policy.prepare_to_explore()
    make = ALGORITHMS[type(config)]
    if make_rollouts is None:
        return make(config, policy, env, seed=seed)
    if "make_rollouts" not in signature(make).parameters:
        raise UserError(
            f"algorithm {config.name} makes its own Collector: it needs rollout_shards 1, staleness 0 and no section "
            "cluster, or a parameter make_rollouts (docs/extend/algorithm.md)"
        )
    return make(config, policy, env, seed=seed, make_rollouts=make_rollouts)
