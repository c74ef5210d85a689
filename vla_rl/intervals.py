"""Confidence intervals of rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def wilson_interval(successes: int, trials: int, z: float = 1.959964) -> tuple[float, float]:
    """95 % score interval of a binomial proportion (Wilson 1927); (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    p = successes / trials
    center = (p + z * z / (2 * trials)) / (1 + z * z / trials)
    half = z / (1 + z * z / trials) * math.sqrt(p * (1 - p) / trials + z * z / (4 * trials * trials))
    return center - half if successes else 0.0, center + half if successes < trials else 1.0


def seeds_interval(successes: Sequence[int], trials: Sequence[int], draws: int = 20_000) -> tuple[float, float]:
    """95 % interval of the mean success rate over training seeds: a hierarchical bootstrap.

    ``successes[i]`` of ``trials[i]`` episodes belong to seed i. Each draw resamples the seeds, then the episodes of
    each, so the interval covers both sources of chance (runs are resampled as by Agarwal et al. 2021). With few seeds
    it is too narrow: it cannot show more variation than the seeds had. Where every episode or none succeeded they show
    none at all: then it is the Wilson interval of all episodes.
    """
    wins, episodes = sum(successes), sum(trials)
    if wins in (0, episodes):
        return wilson_interval(wins, episodes)
    rng = np.random.default_rng(0)
    seed = rng.integers(len(trials), size=(draws, len(trials)))
    total = np.array(trials)[seed]
    mean = (rng.binomial(total, np.array(successes)[seed] / total) / total).mean(1)
    low, high = np.quantile(mean, [0.025, 0.975])
    return float(low), float(high)


def interquartile_mean(scores: np.ndarray) -> float:
    """Mean of what is left when the lowest and the highest quarter of the scores are left out (Agarwal et al. 2021)."""
    ordered = np.sort(scores, axis=None)
    cut = len(ordered) // 4
    return float(ordered[cut : len(ordered) - cut].mean())


def interquartile_interval(scores: np.ndarray, draws: int = 2_000) -> tuple[float, float]:
    """95 % interval of the interquartile mean of ``scores`` [runs, tasks]: a bootstrap of the runs, task by task.

    Stratified as by Agarwal et al. 2021, Sec. 4.1. One run gives an interval of no width: it shows no variation.
    """
    rng, (runs, tasks) = np.random.default_rng(0), scores.shape
    drawn = scores[rng.integers(runs, size=(draws, runs, tasks)), np.arange(tasks)].reshape(draws, -1)
    cut = runs * tasks // 4
    means = np.sort(drawn, axis=1)[:, cut : runs * tasks - cut].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return float(low), float(high)
