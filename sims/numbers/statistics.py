"""Confidence intervals, AUC and thresholds."""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

THRESHOLD_LIMITS = 0.3, 0.95


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """95 % score interval of a binomial proportion (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    p, z = successes / trials, 1.959964
    center = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return center - half if successes else 0.0, center + half if successes < trials else 1.0


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of what is left when the lowest and the highest quarter of the scores are left out (Agarwal et al. 2021)."""
    ordered = np.sort(scores, axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def interquartile_interval(scores: np.ndarray) -> tuple[float, float]:
    """95 % interval of the interquartile mean of ``scores`` [runs, tasks]: a bootstrap of whole runs.

    One policy does all tasks of a run, so that its scores rise and fall together; where each score is of a training of
    its own, Agarwal et al. 2021, Sec. 4.1, draw them task by task. One run gives an interval of no width: it shows no
    variation.
    """
    rng, (runs, tasks) = np.random.default_rng(0), scores.shape
    drawn = scores[rng.integers(runs, size=(2_000, runs))].reshape(2_000, -1)
    cut = runs * tasks // 4
    means = np.sort(drawn, axis=1)[:, cut : runs * tasks - cut].mean(1)
    low, high = bootstrap_interval(means)
    return low, high


def bootstrap_interval(drawn: Float[np.ndarray, " draws"]) -> list[float]:
    """95 % interval of what was computed of every resampling (percentile bootstrap, Efron 1979); NaN is left out."""
    return [float(np.nanquantile(drawn, q)) for q in (0.025, 0.975)]


def auc(score: Float[Tensor, " N"], truth: Bool[Tensor, " N"]) -> float:
    """Probability that a positive scores above a negative, ties counting half; NaN without both."""
    positive, negative = score[truth], score[~truth]
    if not len(positive) or not len(negative):
        return float("nan")
    order = torch.sort(negative).values.contiguous()
    below = torch.searchsorted(order, positive.contiguous(), right=False)
    not_above = torch.searchsorted(order, positive.contiguous(), right=True)
    return ((below + not_above).double() / 2).mean().item() / len(negative)


def auc_within_tasks(score: Float[Tensor, " N"], truth: Bool[Tensor, " N"], task: Int[Tensor, " N"]) -> float:
    """``auc`` over the pairs of one task; NaN without any."""
    total, pairs = 0.0, 0
    for one in task.unique():
        won = truth[task == one]
        if count := int(won.sum() * (~won).sum()):
            total += count * auc(score[task == one], won)
            pairs += count
    return total / pairs if pairs else float("nan")


def auc_interval(
    score: Float[Tensor, " N"], truth: Bool[Tensor, " N"], task: Int[Tensor, " N"], rng: np.random.Generator
) -> list[float]:
    """95 % interval of ``auc_within_tasks`` (bootstrap over episodes)."""
    drawn = torch.from_numpy(rng.integers(len(score), size=(1000, len(score))))
    return bootstrap_interval(np.array([auc_within_tasks(score[one], truth[one], task[one]) for one in drawn]))


def rate_difference_within_tasks(a: Bool[Tensor, " N"], b: Bool[Tensor, " N"], task: Int[Tensor, " N"]) -> float:
    """Absolute difference of the rates of ``a`` and ``b`` in a task, mean over tasks by their entries: what one task
    has too much of does not make up for what another lacks."""
    gaps = [(a[task == one].float() - b[task == one].float()).sum().abs() for one in task.unique()]
    return (torch.stack(gaps).sum() / len(task)).item()


def length_matched_auc(
    curve: Float[Tensor, "N steps"],
    truth: Bool[Tensor, " N"],
    length: Int[Tensor, " N"],
    task: Int[Tensor, " N"],
    rng: np.random.Generator,
) -> tuple[float, list[float], int] | None:
    """AUC in which an episode's length tells nothing, its 95 % interval, and the number of pairs; None without any.

    ``curve[i, t]``: the highest score of episode i within t + 1 steps. A success of T steps is compared with every
    failure of its task that was at least as long, both by their highest scores within T steps: over its whole length a
    failure has more chances of a high score, and one that ended early has fewer. Interval: bootstrap of successes and
    failures.
    """
    won, lost = truth.nonzero().flatten(), (~truth).nonzero().flatten()
    at = (length[won] - 1).clamp(max=curve.shape[1] - 1)
    above, failures = curve[won, at][:, None], curve[lost][:, at].T
    comparable = (task[lost] == task[won][:, None]) & (length[lost] >= length[won][:, None])
    wins = np.where(comparable, (above > failures) + 0.5 * (above == failures), np.nan)
    pairs = int(np.isfinite(wins).sum())
    if not pairs:
        return None
    rows, columns = (rng.integers(size, size=(1000, size)) for size in wins.shape)
    drawn = [wins[np.ix_(row, column)] for row, column in zip(rows, columns, strict=True)]
    means = np.array([np.nanmean(one) for one in drawn if np.isfinite(one).any()])
    return float(np.nanmean(wins)), bootstrap_interval(means), pairs


def mean_interval(values: Float[np.ndarray, " N"], rng: np.random.Generator) -> list[float] | None:
    """95 % interval of the mean (bootstrap); None for fewer than two values."""
    if len(values) < 2:
        return None
    return bootstrap_interval(values[rng.integers(len(values), size=(1000, len(values)))].mean(1))


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
