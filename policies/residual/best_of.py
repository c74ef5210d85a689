"""The best of several samples of a policy, by a critic.

    a = argmax over a_1 .. a_N ~ base(. | s) of the mean over members of Q(s, a_i)     (Li et al. 2025, Q-chunking)

The base proposes, by denoising N draws of noise, and clones what was recorded and what was acted; it follows no
gradient of Q. So the actions stay like those that were done, and a chunk is chosen as a whole. Exploring and deployed
it acts alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from episodes.sampler import Targets
from policies.normalizer import in_units
from policies.policy import ActionSample, Policy, RobotSpec, Stateless
from policies.registry import POLICIES, PolicyConfig, build_policy
from policies.residual.ensemble import EnsembleConfig, QEnsemble
from policies.residual.on_base import InBaseContext
from sims.errors import UserError
from sims.numbers.ranges import Width


@dataclass(frozen=True, kw_only=True)
class BestOfPolicyConfig:
    """What a bundle says of such a policy: its base, how many ``samples`` of it, and the critic that chooses."""

    name: Literal["best_of"] = "best_of"
    base: PolicyConfig
    samples: Width
    critic: EnsembleConfig


class BestOfPolicy(InBaseContext[Any, Stateless]):
    """Any policy of the registry as its base; only one that denoises from noise has different samples.

    Its noise is that of all samples, one after another. It has no likelihood: ``log_prob`` has no step (S = 0).
    """

    config: BestOfPolicyConfig

    def __init__(self, config: BestOfPolicyConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config = config
        self.base = build_policy(config.base, robot)
        self.can_be_traced = self.base.can_be_traced
        spec = self.base.spec
        length, width = spec.noise_shape
        self.spec = replace(spec, noise_shape=(config.samples * length, width))
        numbers = spec.action_horizon * robot.action_dim
        self.critic = QEnsemble(config.critic, feature_dim=spec.value_dim, action_numbers=numbers)

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        return {**self.base.parameter_groups(), "critic": list(self.critic.parameters())}

    # -- acting -------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def sample(self, context: Any, generator: torch.Generator) -> ActionSample:
        action = self.act(context, generator)
        return ActionSample(action=action, trace=Stateless(), log_prob=action[:, None][:, :0])

    def act_from_noise(
        self,
        context: Any,
        noise: Float[Tensor, "B noise_length noise_width"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        samples = self.config.samples

        def repeat(tensor: Tensor) -> Tensor:
            return tensor.repeat_interleave(samples, dim=0)

        draws = noise.unflatten(1, (samples, -1)).flatten(0, 1)
        kept = None if committed is None else repeat(committed)
        proposed = self.base.act_from_noise(context.map(repeat), draws, kept, known).unflatten(0, (-1, samples))
        q = self.critic(self.value_features(context), in_units(self.base, proposed.float().transpose(0, 1))).mean(0)
        best = q.argmax(0)[:, None, None, None].expand(-1, 1, *proposed.shape[2:])
        return proposed.gather(1, best).squeeze(1)

    # -- learning -----------------------------------------------------------------------------------------------------

    def bc_loss(self, context: Any, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """Of the base."""
        return self.base.bc_loss(context, targets, generator)

    @property
    def log_prob_steps(self) -> int:
        return 0

    def log_prob(self, context: Any, trace: Stateless) -> Float[Tensor, "B 0 H A"]:
        raise UserError(
            "the policy chooses among samples by a critic and has no likelihood: it is trained by algorithm off_policy "
            "with best_of: {}"
        )

    def entropy(self, context: Any, trace: Stateless) -> Float[Tensor, "B 0 H A"]:
        return self.log_prob(context, trace)


def best_of(base: Policy[Any, Any], *, samples: int, critic: EnsembleConfig) -> BestOfPolicy:
    """The best of ``samples`` of a copy of ``base``, by a critic that starts at zero, from torch's global random state.

    One that chooses already goes on with its critic. UserError where that is another one, and where ``base`` has a
    residual.
    """
    if isinstance(base, BestOfPolicy):
        wanted = replace(base.config, samples=samples, critic=critic)
        if base.config != wanted:
            raise UserError(
                f"the policy chooses already, by {base.config.critic} among {base.config.samples} samples: set "
                "algorithm.critic and algorithm.best_of to that"
            )
        return base
    if type(base.config) not in POLICIES:
        raise UserError(f"a policy that is a {base.config.name} already is not chosen from: leave start.residual out")
    policy = BestOfPolicy(BestOfPolicyConfig(base=base.config, samples=samples, critic=critic), base.spec.robot)
    policy.to(base.device).base.load_state_dict(base.state_dict())
    policy.precision = base.precision
    return policy.eval()
