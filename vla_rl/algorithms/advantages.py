"""Advantage estimators: pure functions of a rollout's numbers."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def gae(
    *,
    reward: Float[Tensor, "T N"],
    value: Float[Tensor, "T N"],
    next_value: Float[Tensor, "T N"],
    terminated: Bool[Tensor, "T N"],
    truncated: Bool[Tensor, "T N"],
    discount: Float[Tensor, "T N"],
    gae_lambda: float,
) -> Float[Tensor, "T N"]:
    """Generalized advantage estimation over chunks (Schulman et al. 2016, Eq. 16, with a discount per chunk).

    ``reward`` is what the chunk earned, discounted within it; ``discount`` = gamma ** num_executed. ``next_value`` is
    the value of the chunk's *true* successor, also where the episode was truncated: delta_t = r_t + discount_t
    V(s_{t+1}) (1 - terminated_t) - V(s_t). The accumulation stops at every end, terminated or truncated.
    """
    delta = reward + discount * next_value * ~terminated - value
    carry = discount * gae_lambda * ~(terminated | truncated)
    advantage = torch.zeros_like(delta)
    running = torch.zeros_like(delta[0])
    for t in reversed(range(len(delta))):
        running = delta[t] + carry[t] * running
        advantage[t] = running
    return advantage


def group_advantage(returns: Float[Tensor, "groups G"], *, scale_by_std: bool) -> Float[Tensor, "groups G"]:
    """Return relative to the group that shares a start (Shao et al. 2024, DeepSeekMath, Eq. 3's normalized reward).

    Each group's advantages sum to zero. ``scale_by_std=False`` subtracts the mean only (Liu et al. 2025, Dr. GRPO).
    """
    advantage = returns - returns.mean(-1, keepdim=True)
    if scale_by_std:
        advantage = advantage / (returns.std(-1, correction=0, keepdim=True) + 1e-6)
    return advantage


def informative_groups(success: Bool[Tensor, "groups G"], *, low: float, high: float) -> Bool[Tensor, " groups"]:
    """Groups whose mean success lies in [low, high]: the others have no, or hardly any, gradient."""
    mean = success.float().mean(-1)
    return (mean >= low) & (mean <= high)
