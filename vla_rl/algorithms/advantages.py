"""Advantage estimators: pure functions of a rollout's numbers."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
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


def episode_return(
    reward: Float[Tensor, "T N"], num_executed: Int[Tensor, "T N"], valid: Bool[Tensor, "T N"], *, gamma: float
) -> Float[Tensor, " N"]:
    """sum_t gamma^(control steps before chunk t) reward_t over the valid chunks of one episode per environment.

    ``reward`` is already discounted within its chunk.
    """
    executed = torch.where(valid, num_executed, 0)
    before = executed.cumsum(0) - executed
    return torch.where(valid, gamma ** before.to(reward.dtype) * reward, 0.0).sum(0)


def group_advantage(returns: Float[Tensor, "groups G"], *, scale_by_std: bool) -> Float[Tensor, "groups G"]:
    """Return relative to the group that shares a start (Shao et al. 2024, DeepSeekMath, Eq. 3's normalized reward).

    Each group's advantages sum to zero; those of equal returns are 0, which rounding of their mean would miss.
    ``scale_by_std=False`` subtracts the mean only (Liu et al. 2025, Dr. GRPO).
    """
    equal = returns.amax(-1, keepdim=True) == returns.amin(-1, keepdim=True)
    advantage = torch.where(equal, 0.0, returns - returns.mean(-1, keepdim=True))
    if scale_by_std:
        advantage = advantage / (returns.std(-1, correction=0, keepdim=True) + 1e-6)
    return advantage


def informative_groups(success: Bool[Tensor, "groups G"], *, low: float, high: float) -> Bool[Tensor, " groups"]:
    """Groups whose mean success lies in [low, high]: the others have no, or hardly any, gradient."""
    mean = success.float().mean(-1)
    return (mean >= low) & (mean <= high)
