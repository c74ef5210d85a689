"""What a Q function is trained towards: pure maths."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor


def td_target(
    reward: Float[Tensor, " B"], discount: Float[Tensor, " B"], next_q: Float[Tensor, "members B"]
) -> Float[Tensor, " B"]:
    """y = sum_{i<k} gamma^i r_i + gamma^k min_members Q'(s', a') (Chen et al. 2021, REDQ, Eq. 1, with k steps).

    ``reward`` is the discounted sum until s' and ``discount`` gamma ** k, which is 0 where the task ended: a time limit
    is no end. SAC with entropy backup passes Q' - temperature * log pi(a' | s') as ``next_q``.
    """
    return reward + discount * next_q.min(dim=0).values


def temperature_loss(
    log_temperature: Float[Tensor, ""], log_prob: Float[Tensor, " B"], target_entropy: float
) -> Float[Tensor, ""]:
    """Raises the temperature while the entropy is below its target (Haarnoja et al. 2018b, Eq. 18)."""
    return -(log_temperature * (log_prob.detach() + target_entropy)).mean()
