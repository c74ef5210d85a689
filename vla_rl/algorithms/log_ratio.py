"""From per-element log-probs to the ratios that are clipped: the reduction is named here, once."""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

MAX_LOG_RATIO = 20.0  # float32 overflows at 88.7; a ratio of e^20 is as useless, but its loss and gradient are finite

Reduction = Literal["chunk_sum", "chunk_mean", "step_sum", "step_mean"]
"""What one ratio covers, and how its elements are joined.

``chunk_*``: one ratio per chunk, over denoising steps, counted actions and dimensions (pi_RL's chunk level).
``step_*``: one ratio per denoising step (DPPO's two-layer MDP). A clip of eps on a mean over n elements binds like
n * eps on a sum.
"""


def reduce_log_ratio(
    difference: Float[Tensor, "B S H A"], counted: Bool[Tensor, "B S H"], reduction: Reduction
) -> Float[Tensor, "B units"]:
    """``difference`` = new - old log-prob per element, float32; units is 1 for chunk reductions and S for step ones.

    ``counted``: the elements whose log-probs belong to the ratio (``Policy.counted``).
    """
    if difference.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"log-probs must be float32 or float64, got {difference.dtype}")
    mask = counted.unsqueeze(-1)
    dims = (1, 2, 3) if reduction.startswith("chunk") else (2, 3)
    total = (difference * mask).sum(dims)
    if reduction.endswith("mean"):
        total = total / mask.expand_as(difference).sum(dims).clamp(min=1)
    return total.reshape(len(difference), -1)


def approximate_kl(log_ratio: Float[Tensor, "*B"]) -> Float[Tensor, ""]:
    """Mean of (r - 1) - log r, a non-negative estimate of KL(old || new) (Schulman 2020, 'k3'); finite."""
    return (log_ratio.clamp(max=MAX_LOG_RATIO).expm1() - log_ratio).clamp(min=0).mean()
