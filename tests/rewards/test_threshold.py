"""Calibration, what is declared, and the threshold at a stated precision, against numbers worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vla_rl.rewards.calibration import calibration_error, platt, reliability
from vla_rl.rewards.classifier import SuccessClassifierConfig
from vla_rl.rewards.declared import ScoredEpisode, choose_threshold, episode_rates
from vla_rl.rewards.labels import NEVER


def test_calibration_finds_the_scale_and_the_offset_of_the_truth() -> None:
    generator = torch.Generator().manual_seed(0)
    logit = 3 * torch.randn(20_000, generator=generator)
    truth = torch.rand(len(logit), generator=generator) < torch.sigmoid(0.5 * logit - 1)
    scale, offset = platt(logit, truth)
    assert scale == pytest.approx(0.5, abs=0.03)
    assert offset == pytest.approx(-1, abs=0.06)
    before, after = (calibration_error(reliability(torch.sigmoid(z), truth)) for z in (logit, scale * logit + offset))
    assert before > 0.1
    assert after < 0.01


def test_calibration_without_errors_stays_finite() -> None:
    scale, offset = platt(torch.tensor([-2.0, -1, 1, 2, 3]), torch.tensor([False, False, True, True, True]))
    assert 0 < scale < 10
    assert abs(offset) < 10
    with pytest.raises(ValueError, match="positives and negatives, got 0 and 2"):
        platt(torch.zeros(2), torch.zeros(2, dtype=torch.bool))


def test_the_reliability_curve_by_hand() -> None:
    rows = reliability(torch.tensor([0.05, 0.05, 0.95, 1.0]), torch.tensor([False, True, True, True]))
    assert [(row["count"], row["share"]) for row in rows] == [(2, 0.5), (2, 1.0)]
    assert calibration_error(rows) == pytest.approx((2 * 0.45 + 2 * 0.025) / 4)


def scored(*probability: float, earliest: int = NEVER, terminated: bool = False) -> ScoredEpisode:
    """Classified after 4, 8, 12, ... control steps."""
    step = 4 * np.arange(1, len(probability) + 1)
    return ScoredEpisode(
        probability=np.array(probability), step=step, terminated=terminated, earliest=earliest, task="push"
    )


@pytest.mark.parametrize(
    ("episode", "at"),
    [
        (scored(0.9, 0.1, 0.9, 0.9), 16),
        (scored(0.9, 0.9, 0.1), 8),
        (scored(0.1, 0.1, 0.9), NEVER),  # cut off by the time limit before the second observation
        (scored(0.1, 0.1, 0.9, terminated=True), 12),  # ended by the environment: nothing moves any more
        (scored(0.1, 0.9, 0.1, terminated=True), NEVER),
    ],
)
def test_two_observations_in_a_row_declare_success(episode: ScoredEpisode, at: int) -> None:
    assert episode.declared(0.5, 2) == at
    assert episode.score(2) == (0.9 if at < NEVER else 0.1)


def test_the_threshold_has_the_precision_and_among_those_the_best_recall() -> None:
    wins = [scored(0.1, score, score, earliest=8) for score in (0.9, 0.8, 0.5, 0.3)]
    losses = [scored(0.1, score, score) for score in (0.6, 0.2, 0.1)]
    config = SuccessClassifierConfig(consecutive=2, precision=0.75)
    threshold, best = choose_threshold([*wins, *losses], config)
    assert threshold is not None
    assert 0.2 < threshold < 0.3  # four of five are right; a lower one is right four times of six
    assert best == 1.0
    strict, _ = choose_threshold([*wins, *losses], SuccessClassifierConfig(consecutive=2, precision=0.9))
    assert strict is not None
    assert 0.6 < strict < 0.8
    assert choose_threshold(losses, config) == (None, 0.0)


def test_success_that_is_declared_too_early_is_wrong() -> None:
    early = scored(0.9, 0.9, 0.9, earliest=12)
    assert choose_threshold([early], SuccessClassifierConfig(consecutive=2, precision=0.5)) == (None, 0.0)


def test_rates_of_episodes_by_hand() -> None:
    declared, succeeded = np.array([1, 1, 1, 0, 0], dtype=bool), np.array([1, 1, 0, 1, 0], dtype=bool)
    right = np.array([1, 0, 0, 0, 0], dtype=bool)  # the second was declared too early
    rates = episode_rates(declared, right, succeeded)
    assert rates["precision"]["value"] == pytest.approx(1 / 3)
    assert rates["recall"]["value"] == pytest.approx(1 / 3)
    assert rates["false_positive_rate"]["value"] == pytest.approx(1 / 2)
    assert rates["precision"]["interval"][0] < 1 / 3 < rates["precision"]["interval"][1]
