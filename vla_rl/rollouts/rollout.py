"""What a collector hands to an algorithm."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from policies.policy import DenoisingTrace
from sims.tensor_dataclass import TensorDataclass


@dataclass(frozen=True, kw_only=True)
class Rollout(TensorDataclass):
    """Chunks, time-major [T, N].

    ``inputs`` is the Observation that the policy saw, or its encoded Context where the encoder is frozen.
    ``reward`` is discounted within the chunk, whose own discount is gamma ** num_executed. ``next_value`` belongs to
    the chunk's true successor. ``valid`` is False where a row stood still or its world failed: such chunks are data
    of nothing and no loss may see them.
    """

    inputs: TensorDataclass
    path: DenoisingTrace
    log_prob: Float[Tensor, "*TN S H A"]
    reward: Float[Tensor, "*TN"]
    num_executed: Int[Tensor, "*TN"]
    terminated: Bool[Tensor, "*TN"]
    truncated: Bool[Tensor, "*TN"]
    success: Bool[Tensor, "*TN"]
    valid: Bool[Tensor, "*TN"]
    value: Float[Tensor, "*TN"]
    next_value: Float[Tensor, "*TN"]
    task: Int[Tensor, "*TN"]
    policy_version: Int[Tensor, "*TN"]

    def columns(self, index: Tensor) -> Rollout:
        """These of the N rows."""
        return self.map(lambda tensor: tensor[:, index])

    @property
    def done(self) -> Tensor:
        return self.terminated | self.truncated

    def success_rate(self) -> float:
        """Of the episodes that ended in this rollout; NaN if none did."""
        ended = self.done & self.valid
        return (self.success & ended).sum().item() / max(1, ended.sum().item()) if ended.any() else float("nan")

    def control_steps(self) -> int:
        return int(torch.where(self.valid, self.num_executed, 0).sum())
