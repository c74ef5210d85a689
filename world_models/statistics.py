"""AUC, thresholds and bootstrap intervals."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

THRESHOLD_LIMITS = 0.3, 0.95


def auc(score: Float[Tensor, " N"], truth: Bool[Tensor, " N"]) -> float:
    """Probability that a positive scores above a negative, ties counting half; NaN without both."""
    positive, negative = score[truth], score[~truth]
    if not len(positive) or not len(negative):
        return float("nan")
    order = torch.sort(negative).values.contiguous()
    below = torch.searchsorted(order, positive.contiguous(), right=False)
    not_above = torch.searchsorted(order, positive.contiguous(), right=True)
    return ((below + not_above).double() / 2).mean().item() / len(negative)


def auc_interval(
    score: Float[Tensor, " N"], truth: Bool[Tensor, " N"], rng: np.random.Generator, draws: int = 1000
) -> list[float]:
    """95 % interval (percentile bootstrap over episodes)."""
    drawn = torch.from_numpy(rng.integers(len(score), size=(draws, len(score))))
    values = np.array([auc(score[index], truth[index]) for index in drawn])
    return [float(np.nanquantile(values, q)) for q in (0.025, 0.975)]


def length_matched_auc(
    curve: Float[Tensor, "N steps"], truth: Bool[Tensor, " N"], length: Int[Tensor, " N"], rng: np.random.Generator
) -> tuple[float, list[float], int] | None:
    """AUC in which an episode's length tells nothing, its 95 % interval, and the number of pairs; None without any.

    ``curve[i, t]``: the highest score of episode i within t + 1 steps. A success of T steps is compared with every
    failure that was at least as long, both by their highest scores within T steps: over its whole length a failure has
    more chances of a high score, and one that ended early has fewer. Interval: bootstrap of successes and failures.
    """
    won, lost = truth.nonzero().flatten(), (~truth).nonzero().flatten()
    at = (length[won] - 1).clamp(max=curve.shape[1] - 1)
    above, failures = curve[won, at][:, None], curve[lost][:, at].T
    wins = np.where(length[lost] >= length[won][:, None], (above > failures) + 0.5 * (above == failures), np.nan)
    pairs = int(np.isfinite(wins).sum())
    if not pairs:
        return None
    rows, columns = (rng.integers(size, size=(1000, size)) for size in wins.shape)
    drawn = [wins[np.ix_(row, column)] for row, column in zip(rows, columns, strict=True)]
    means = np.array([np.nanmean(one) for one in drawn if np.isfinite(one).any()])
    return float(np.nanmean(wins)), [float(np.quantile(means, q)) for q in (0.025, 0.975)], pairs


def mean_interval(values: Float[np.ndarray, " N"], rng: np.random.Generator, draws: int = 1000) -> list[float] | None:
    """95 % interval of the mean (percentile bootstrap, Efron 1979); None for fewer than two values."""
    if len(values) < 2:
        return None
    means = values[rng.integers(len(values), size=(draws, len(values)))].mean(1)
    return [float(np.quantile(means, q)) for q in (0.025, 0.975)]


def best_threshold(score: Float[Tensor, " N"], truth: Bool[Tensor, " N"]) -> tuple[float, float]:
    """Threshold that maximizes true-positive minus false-positive rate (Youden 1950), and that maximum.

    It lies in the middle between two different scores: equal ones are all above it, or none is.
    """
    values, order = torch.sort(score, descending=True)
    hits = truth[order].double()
    gain = hits.cumsum(0) / hits.sum() - (1 - hits).cumsum(0) / (1 - hits).sum()
    divides = torch.cat([values[:-1] != values[1:], torch.ones(1, dtype=torch.bool, device=values.device)])
    at = int(gain.where(divides, -torch.inf).argmax())
    following = values[at + 1].item() if at + 1 < len(values) else 0.0
    return (values[at].item() + following) / 2, gain[at].item()


def threshold_exceeded_by(score: Float[Tensor, " N"], count: int) -> float:
    """The lowest threshold, within THRESHOLD_LIMITS, that at most ``count`` of the scores exceed."""
    ordered = torch.sort(score, descending=True).values
    return limit_threshold(ordered[count].item() if count < len(ordered) else 0.0)


def limit_threshold(threshold: float) -> float:
    """``threshold`` clamped to THRESHOLD_LIMITS."""
    return min(max(threshold, THRESHOLD_LIMITS[0]), THRESHOLD_LIMITS[1])
