"""AUC, thresholds and intervals on hand-made scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from world_models.statistics import THRESHOLD_LIMITS, auc, best_threshold, mean_interval, threshold_exceeded_by


def test_auc_is_the_share_of_pairs_in_order() -> None:
    score = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.4])
    truth = torch.tensor([False, False, True, True, True])
    pairs = [(p > n) + 0.5 * (p == n) for p in score[truth].tolist() for n in score[~truth].tolist()]
    assert auc(score, truth) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(-score, truth) == pytest.approx(1 - sum(pairs) / len(pairs))


def test_the_best_threshold_lies_between_the_classes() -> None:
    threshold, gain = best_threshold(torch.tensor([0.9, 0.8, 0.3, 0.1]), torch.tensor([True, True, False, False]))
    assert threshold == pytest.approx(0.55)
    assert gain == pytest.approx(1.0)


def test_a_threshold_is_exceeded_by_the_requested_count() -> None:
    score = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.4])
    for count in (0, 1, 3):
        assert (score > threshold_exceeded_by(score, count)).sum() == count
    assert threshold_exceeded_by(score, 5) == THRESHOLD_LIMITS[0]
    assert threshold_exceeded_by(torch.tensor([0.99]), 0) == THRESHOLD_LIMITS[1]


def test_the_bootstrap_interval_covers_the_mean_of_a_known_sample() -> None:
    values = np.arange(101.0)
    low, high = mean_interval(values, np.random.default_rng(0))  # type: ignore[misc]
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert low == pytest.approx(50 - half, abs=1.0)
    assert high == pytest.approx(50 + half, abs=1.0)
    assert mean_interval(values[:1], np.random.default_rng(0)) is None
