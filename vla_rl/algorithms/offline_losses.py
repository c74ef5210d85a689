"""Losses of learning from recorded actions alone: pure maths."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from policies.residual.conditioned import GOOD, NOT_GOOD, UNLABELED


def expectile_loss(difference: Float[Tensor, " B"], expectile: float) -> Float[Tensor, ""]:
    """Mean of |expectile - 1(u < 0)| u^2 of u = Q - V (Kostrikov et al. 2021, IQL, Eq. 5).

    Least where V is that expectile of Q: .5 is the mean, towards 1 it is the largest value.
    """
    weight = (expectile - (difference < 0).to(difference.dtype)).abs()
    return (weight * difference.square()).mean()


def cloning_weights(advantage: Float[Tensor, " B"], temperature: float, limit: float) -> Float[Tensor, " B"]:
    """min(exp(temperature * A), limit) (Kostrikov et al. 2021, IQL, Eq. 7; Peng et al. 2019, AWR)."""
    return (temperature * advantage).exp().clamp(max=limit)


def positive_labels(advantage: Float[Tensor, " B"], share: float, forced: Bool[Tensor, " B"]) -> Float[Tensor, " B"]:
    """1 where ``forced`` and for the ``share`` of largest advantages of the rest (and those equal to its last).

    0 where the advantage is NaN, which is none of the rest. The host waits for no number.
    """
    others = advantage.masked_fill(forced, torch.nan)
    return (forced | (others >= others.nanquantile(1 - share))).to(advantage.dtype)


def drop_labels(good: Float[Tensor, " B"], dropped: float, generator: torch.Generator) -> Int[Tensor, " B"]:
    """The label of each chunk for the policy: GOOD or NOT_GOOD, but UNLABELED for a random share ``dropped``."""
    kept = torch.rand(good.shape, generator=generator, device=good.device) >= dropped
    return torch.where(kept, torch.where(good == 1, GOOD, NOT_GOOD), UNLABELED)


def conservative_gap(
    uniform_q: Float[Tensor, "members draws B"],
    uniform_log_density: float,
    policy_q: Float[Tensor, "members more B"],
    policy_log_density: Float[Tensor, "more B"],
    recorded_q: Float[Tensor, "members B"],
    returns: Float[Tensor, " B"],
) -> Float[Tensor, ""]:
    """How far values of other actions are above that of the recorded one (Kumar et al. 2020, CQL, Eq. 4).

    logsumexp over draws of Q - log density, minus Q(s, a), mean over members and batch. The policy's actions count as
    at least ``returns``, of the recorded episode from s on (Nakamoto et al. 2023, Cal-QL); -inf where unknown.
    """
    calibrated = torch.maximum(policy_q, returns)
    weighed = torch.cat([uniform_q - uniform_log_density, calibrated - policy_log_density], dim=1)
    return (weighed.logsumexp(1) - recorded_q).mean()
