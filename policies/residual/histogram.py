"""Values as histograms: a critic that classifies the bin of its target (Farebrother et al. 2024, HL-Gauss)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from sims.numbers.ranges import PositiveFloat, Width

MARGIN = 3.0  # standard deviations beyond the support, so that a target at its end keeps its mean


@dataclass(frozen=True, kw_only=True)
class HistogramConfig:
    """``bins`` of equal width; targets lie from ``low`` to ``high``, and what is beyond counts as that.

    ``spread``: std of the Gaussian that a target is spread by, in bins. Before training every value is the middle.
    """

    bins: Width = 101
    low: float = 0.0
    high: float = 1.0
    spread: PositiveFloat = 0.75

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError(f"histogram.low ({self.low}) must be below high ({self.high})")
        if self.bins <= 2 * MARGIN * self.spread:
            raise ValueError(f"histogram.bins ({self.bins}) must be more than {2 * MARGIN * self.spread:g}")

    @property
    def width(self) -> float:
        """Of a bin: [low, high] and the margins on both sides are divided into ``bins``."""
        return (self.high - self.low) / (self.bins - 2 * MARGIN * self.spread)

    @property
    def margin(self) -> float:
        """How far values can be beyond the ends."""
        return MARGIN * self.spread * self.width

    def beyond(self, target: Float[Tensor, "*B"]) -> Bool[Tensor, "*B"]:
        """Where a target is farther outside than values can be."""
        return (target < self.low - self.margin) | (target > self.high + self.margin)

    def edges(self, like: Tensor) -> Float[Tensor, " edges"]:
        first = self.low - self.margin
        return first + self.width * torch.arange(self.bins + 1, dtype=like.dtype, device=like.device)


def spread_target(config: HistogramConfig, target: Float[Tensor, "*B"]) -> Float[Tensor, "*B bins"]:
    """Probabilities of the bins: p_i = Phi((e_{i+1} - y) / sigma) - Phi((e_i - y) / sigma), normalized."""
    target = target.clamp(config.low, config.high)[..., None]
    below = torch.special.ndtr((config.edges(target) - target) / (config.spread * config.width))
    probability = below.diff(dim=-1)
    return probability / probability.sum(-1, keepdim=True)


def mean_value(config: HistogramConfig, logits: Float[Tensor, "*B bins"]) -> Float[Tensor, "*B"]:
    """Of the bins' middles under softmax(logits)."""
    middles = config.edges(logits)[:-1] + config.width / 2
    return logits.softmax(-1) @ middles


def histogram_loss(
    config: HistogramConfig, logits: Float[Tensor, "members B bins"], target: Float[Tensor, " B"]
) -> Float[Tensor, ""]:
    """Mean cross-entropy with the spread target, over members and batch."""
    probability = spread_target(config, target).expand_as(logits)
    return functional.cross_entropy(logits.flatten(0, -2), probability.flatten(0, -2))
