"""A policy that is told whether the actions it is to predict are good (pi*0.6's advantage conditioning).

    pi(a | s, I),   I: good, not good, or unlabeled   (Physical Intelligence 2025, arXiv:2511.14759)

All that was recorded is cloned, each chunk under its label, and the policy acts under "good". A part of the chunks is
cloned without a label, so that acting can be guided away from what is done anyway (Ho and Salimans 2022):

    prediction = (1 - guidance) prediction(unlabeled) + guidance prediction(good)

The label is an embedding that the policy adds to what it made of the observation. Both embeddings start at zero: the
new policy is the base, whatever the guidance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from episodes.sampler import Targets
from policies.denoising.chunk_policy import Conditionable
from policies.denoising.denoise import between
from policies.policy import ActionSample, Policy, RobotSpec
from policies.registry import POLICIES, PolicyConfig, build_policy
from policies.residual.on_base import InBaseContext
from sims.errors import UserError
from sims.numbers.ranges import NonNegativeFloat

UNLABELED, NOT_GOOD, GOOD = -1, 0, 1


@dataclass(frozen=True, kw_only=True)
class ConditionedPolicyConfig:
    """What a bundle says of such a policy. ``guidance``: 1 acts under "good" alone, which takes half as long."""

    name: Literal["conditioned"] = "conditioned"
    base: PolicyConfig
    guidance: NonNegativeFloat = 1.0


class ConditionedPolicy(InBaseContext[Any, Any]):
    """A policy of the registry that is ``Conditionable``, and the embeddings of "not good" and "good"."""

    config: ConditionedPolicyConfig
    base: Conditionable[Any]
    can_be_traced = False  # nobody has exported one yet

    def __init__(self, config: ConditionedPolicyConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config = config
        base = build_policy(config.base, robot)
        if not isinstance(base, Conditionable):
            raise UserError(f"a policy that is a {config.base.name} cannot be conditioned: set recap.condition to null")
        self.base, self.spec = base, base.spec
        self.labels = nn.Parameter(torch.zeros(2, base.condition_width))

    def prepare_to_explore(self) -> None:
        self.base.prepare_to_explore()

    def parameter_groups(self) -> Mapping[str, Sequence[nn.Parameter]]:
        return {**self.base.parameter_groups(), "labels": [self.labels]}

    def labelled(self, context: Any, label: Int[Tensor, " B"]) -> Any:
        """``label``: UNLABELED, NOT_GOOD or GOOD for each."""
        embedding = self.labels[label.clamp(min=0)] * (label != UNLABELED)[:, None]
        return self.base.conditioned(context, embedding)

    def _good(self, context: Any) -> Any:
        return self.labelled(context, torch.full((len(context),), GOOD, device=self.device))

    # -- acting -------------------------------------------------------------------------------------------------------

    def sample(self, context: Any, generator: torch.Generator) -> ActionSample:
        """Under "good", without guidance: its likelihood is that of one prediction."""
        return self.base.sample(self._good(context), generator)

    def act_from_noise(
        self,
        context: Any,
        noise: Float[Tensor, "B noise_length noise_width"],
        committed: Float[Tensor, "B H A"] | None = None,
        known: Bool[Tensor, " H"] | None = None,
    ) -> Float[Tensor, "B H A"]:
        good, guidance = self._good(context), self.config.guidance
        if guidance == 1:
            return self.base.act_from_noise(good, noise, committed, known)
        predict = between(self.base.predict(context), self.base.predict(good), guidance)
        return self.base.act_by(predict, context, noise, committed, known)

    # -- learning -----------------------------------------------------------------------------------------------------

    def log_prob(self, context: Any, trace: Any) -> Float[Tensor, "B S H A"]:
        return self.base.log_prob(self._good(context), trace)

    def counted(self, trace: Any, num_executed: Int[Tensor, " B"]) -> Bool[Tensor, "B S H"]:
        return self.base.counted(trace, num_executed)

    @property
    def log_prob_steps(self) -> int:
        return self.base.log_prob_steps

    @property
    def learns_spread(self) -> bool:
        return self.base.learns_spread

    def entropy(self, context: Any, trace: Any) -> Float[Tensor, "B S H A"]:
        return self.base.entropy(self._good(context), trace)

    def bc_loss(self, context: Any, targets: Targets, generator: torch.Generator) -> Float[Tensor, ""]:
        """All under "good"."""
        return self.base.bc_loss(self._good(context), targets, generator)

    def labelled_loss(
        self, context: Any, targets: Targets, label: Int[Tensor, " B"], generator: torch.Generator
    ) -> Float[Tensor, ""]:
        """The base's cloning loss, each chunk under its label."""
        return self.base.bc_loss(self.labelled(context, label), targets, generator)


def conditioned(base: Policy[Any, Any], *, guidance: float) -> ConditionedPolicy:
    """A copy of ``base`` that can be told what is good; one that can already keeps its embeddings.

    UserError where ``base`` is no policy of the registry that denoises.
    """
    inner = base.base if isinstance(base, ConditionedPolicy) else base
    if type(inner.config) not in POLICIES:
        raise UserError(f"a policy that is a {inner.config.name} already cannot be conditioned: start from its base")
    policy = ConditionedPolicy(ConditionedPolicyConfig(base=inner.config, guidance=guidance), inner.spec.robot)
    policy.to(inner.device).base.load_state_dict(inner.state_dict())
    if isinstance(base, ConditionedPolicy):
        policy.labels.data.copy_(base.labels)
    policy.precision = inner.precision
    return policy.eval()
