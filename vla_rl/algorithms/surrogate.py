"""The clipped policy surrogate and the clipped value loss: pure maths, shared by PPO and GRPO."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from vla_rl.algorithms.log_ratio import MAX_LOG_RATIO


def clipped_surrogate(
    log_ratio: Float[Tensor, "B units"],
    advantage: Float[Tensor, "B #units"],
    *,
    clip_low: Float[Tensor, "#units"] | Float[Tensor, ""],
    clip_high: Float[Tensor, "#units"] | Float[Tensor, ""],
    dual_clip: float | None,
) -> Float[Tensor, "B units"]:
    """Loss per ratio (Schulman et al. 2017, Eq. 7), clipped to [1 - clip_low, 1 + clip_high].

    ``dual_clip`` c > 1 bounds the loss of negative advantages at c |A| (Ye et al. 2020, Eq. 5), so that one sample
    with a huge ratio cannot dominate a batch. Loss and gradient are finite whatever the ratio: none is taken above
    exp(MAX_LOG_RATIO), where it has no gradient.
    """
    ratio = log_ratio.clamp(max=MAX_LOG_RATIO).exp()
    loss = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(advantage < 0, torch.minimum(loss, -dual_clip * advantage), loss)
    return loss


def value_loss(
    value: Float[Tensor, " B"],
    old_value: Float[Tensor, " B"],
    target: Float[Tensor, " B"],
    *,
    clip: float | None,
    huber_delta: float,
) -> Float[Tensor, " B"]:
    """Huber loss, pessimistic between the value and its clipped move from ``old_value`` (PPO2's value clipping)."""

    def huber(prediction: Tensor) -> Tensor:
        return functional.huber_loss(prediction, target, reduction="none", delta=huber_delta)

    if clip is None:
        return huber(value)
    return torch.maximum(huber(value), huber(old_value + (value - old_value).clamp(-clip, clip)))


def explained_variance(value: Float[Tensor, "*B"], target: Float[Tensor, "*B"]) -> float:
    """1 - Var(target - value) / Var(target); 0 where the target does not vary."""
    correction = min(1, target.numel() - 1)
    variance = target.var(correction=correction).item()
    return 1 - (target - value).var(correction=correction).item() / variance if variance > 1e-12 else 0.0
