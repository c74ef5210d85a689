"""AUC, thresholds and intervals on hand-made scores."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from sims.numbers.statistics import (
    THRESHOLD_LIMITS,
    auc,
    auc_interval,
    auc_within_tasks,
    best_threshold,
    interquartile_interval,
    length_matched_auc,
    mean_interval,
    threshold_exceeded_by,
)

ONE_TASK = torch.zeros(4, dtype=torch.long)


def test_auc_is_the_share_of_pairs_in_order() -> None:
    score = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.4])
    truth = torch.tensor([False, False, True, True, True])
    pairs = [(p > n) + 0.5 * (p == n) for p in score[truth].tolist() for n in score[~truth].tolist()]
    assert auc(score, truth) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(-score, truth) == pytest.approx(1 - sum(pairs) / len(pairs))


def test_scores_that_know_the_task_alone_tell_nothing() -> None:
    """Of the first task 9 of 10 episodes succeed, of the second 1 of 10; a third has no failures."""
    task = torch.tensor([0] * 10 + [1] * 10 + [2] * 5)
    truth = torch.tensor([True] * 9 + [False] * 10 + [True] * 6)
    length, rng = torch.where(truth, 3, 6), np.random.default_rng(0)
    score = torch.tensor([0.8, 0.2, 0.9])[task]
    assert auc(score, truth) > 0.9
    assert auc_within_tasks(score, truth, task) == 0.5
    assert auc_interval(score, truth, task, rng) == [0.5, 0.5]
    assert length_matched_auc(score[:, None].expand(-1, 6), truth, length, task, rng) == (0.5, [0.5, 0.5], 9 + 9)
    better = score + 0.05 * truth
    assert auc_within_tasks(better, truth, task) == 1.0
    assert math.isnan(auc_within_tasks(score[task == 2], truth[task == 2], task[task == 2]))


def test_auc_within_one_task_is_the_auc() -> None:
    score, truth = torch.rand(30, generator=torch.Generator().manual_seed(0)), torch.arange(30) % 3 == 0
    assert auc_within_tasks(score, truth, torch.ones(30, dtype=torch.long)) == pytest.approx(auc(score, truth))


def test_tasks_that_rise_and_fall_with_their_run_make_no_mean_more_certain() -> None:
    scores = np.random.default_rng(0).normal(0.6, 0.08, (8, 1))
    assert interquartile_interval(scores.repeat(4, axis=1)) == pytest.approx(interquartile_interval(scores))


def test_a_longer_episode_has_no_more_chances_in_a_length_matched_auc() -> None:
    """Scores that only grow with time: failures last longer and score higher, yet within equal times none does."""
    length = torch.tensor([3, 4, 10, 10])
    truth = torch.tensor([True, True, False, False])
    curve = torch.arange(10).expand(4, -1) / 10
    curve = torch.minimum(curve, (length[:, None] - 1) / 10)
    assert auc(curve[:, -1], truth) == 0.0
    assert length_matched_auc(curve, truth, length, ONE_TASK[:4], np.random.default_rng(0)) == (0.5, [0.5, 0.5], 4)
    better = curve + 0.05 * truth[:, None]
    assert length_matched_auc(better, truth, length, ONE_TASK[:4], np.random.default_rng(0)) == (1.0, [1.0, 1.0], 4)


def test_failures_that_end_early_are_not_compared() -> None:
    curve, rng = torch.rand(3, 8).cummax(1).values, np.random.default_rng(0)
    truth = torch.tensor([True, False, False])
    found = length_matched_auc(curve, truth, torch.tensor([5, 4, 5]), ONE_TASK[:3], rng)
    assert found is not None
    assert found[0] == float(curve[0, 4] > curve[2, 4])
    assert found[2] == 1
    assert length_matched_auc(curve, truth, torch.tensor([5, 4, 4]), ONE_TASK[:3], rng) is None
    assert length_matched_auc(curve, torch.tensor([True] * 3), torch.tensor([5, 4, 4]), ONE_TASK[:3], rng) is None


def test_the_best_threshold_lies_between_the_classes() -> None:
    threshold, gain = best_threshold(torch.tensor([0.9, 0.8, 0.3, 0.1]), torch.tensor([True, True, False, False]))
    assert threshold == pytest.approx(0.55)
    assert gain == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("score", "truth", "threshold", "gain"),
    [
        ([0.9, 0.9, 0.9, 0.9], [True, True, False, False], 0.45, 0.0),
        ([1.0, 1.0, 1.0, 1.0, 0.2], [True, True, False, False, False], 0.6, 1 / 3),
        ([0.9, 0.5, 0.5, 0.1], [True, True, False, False], 0.7, 0.5),
    ],
)
def test_equal_scores_are_on_one_side_of_the_best_threshold(
    score: list[float], truth: list[bool], threshold: float, gain: float
) -> None:
    """The gain is that of the threshold that is returned."""
    scores, positive = torch.tensor(score), torch.tensor(truth)
    found, reached = best_threshold(scores, positive)
    assert (found, reached) == (pytest.approx(threshold), pytest.approx(gain))
    above = (scores > found).double()
    assert (above[positive].mean() - above[~positive].mean()).item() == pytest.approx(reached)


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
