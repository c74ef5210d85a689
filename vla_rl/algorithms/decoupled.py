"""Decoupled PPO: updates from rollouts of older weights (Hilton et al. 2021; Fu et al. 2025, AReaL, Eq. 5).

The clip is around the proximal policy, the weights at the start of the update; a weight corrects for the behavior
policy, the older weights that acted: L = -E[w min(r A, clip(r) A)] with r = pi / pi_proximal and
w = pi_proximal / pi_behavior.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from vla_rl.algorithms.log_ratio import Reduction, approximate_kl, reduce_log_ratio


def behavior_weight(
    proximal: Float[Tensor, "B S H A"],
    behavior: Float[Tensor, "B S H A"],
    counted: Bool[Tensor, "B S H"],
    reduction: Reduction,
    *,
    limit: float,
) -> Float[Tensor, "B units"]:
    """w of each ratio, 0 where it is above ``limit``: a mean over all of them divides by the count before dropping.

    The geometric mean over the elements that the ratio covers. It is biased; the product over a chunk's denoising
    steps, actions and dimensions would be beyond any limit after one update.
    """
    mean: Reduction = "chunk_mean" if reduction.startswith("chunk") else "step_mean"
    weight = reduce_log_ratio(proximal - behavior, counted, mean).exp()
    return torch.where(weight > limit, 0.0, weight)


def effective_share(weight: Float[Tensor, "*B"]) -> Float[Tensor, ""]:
    """Effective sample size as a share of the samples: (sum w)^2 / (n sum w^2) (Kong 1992); 1 for equal weights."""
    return weight.sum().square() / (weight.numel() * weight.square().sum()).clamp(min=1e-12)


def decoupling_metrics(
    proximal: Float[Tensor, "B S H A"],
    behavior: Float[Tensor, "B S H A"],
    counted: Bool[Tensor, "B S H"],
    weight: Float[Tensor, "B units"],
) -> dict[str, Tensor]:
    """How far the behavior policy is: KL(behavior || proximal) in sum units, share of weights dropped, sample size."""
    total = reduce_log_ratio(proximal - behavior, counted, "chunk_sum")
    return {
        "behavior_kl": approximate_kl(total),
        "behavior_dropped": (weight == 0).float().mean(),
        "effective_share": effective_share(weight),
    }
