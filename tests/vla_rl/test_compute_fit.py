"""Success as a function of compute: what is fitted, and what is refused."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from vla_rl.report.compute import Sigmoid, compute_fit, fit_sigmoid
from vla_rl.report.run_data import RunData

TRUE = Sigmoid(start=0.2, asymptote=0.9, middle=40_000.0, exponent=2.0)


def run_of(success: Sequence[float], steps: float = 10_000.0) -> RunData:
    """A run whose validations, one after each iteration of ``steps`` control steps, are ``success``."""
    metrics = [{"iteration": i, "control_steps": steps, "validation": value} for i, value in enumerate(success)]
    return RunData(
        name="run",
        path=Path("run"),
        config_text="",
        settings={},
        metrics=metrics,
        iterations=len(metrics),
        imitation=(),
        result={},
        command="",
        videos={},
    )


def curve(noise: float, seed: int, points: int = 20) -> RunData:
    rng = np.random.default_rng(seed)
    return run_of([TRUE.at(10_000.0 * (i + 1)) + noise * rng.standard_normal() for i in range(points)])


def test_the_sigmoid_is_halfway_at_its_middle_and_is_found_again() -> None:
    assert TRUE.at(40_000.0) == pytest.approx(0.55)  # (.2 + .9) / 2
    assert TRUE.at(80_000.0) == pytest.approx(0.2 + 0.7 / 1.25)  # 1 + (1/2)^2
    compute = np.linspace(5_000, 200_000, 20)
    found = fit_sigmoid(compute, np.array([TRUE.at(one) for one in compute]))
    assert found.asymptote == pytest.approx(0.9, abs=0.01)
    assert found.at(400_000.0) == pytest.approx(TRUE.at(400_000.0), abs=0.01)


def test_runs_that_agree_predict_up_to_four_times_their_compute() -> None:
    fit = compute_fit([curve(0.01, seed) for seed in range(5)])
    assert fit is not None and not fit.refused
    assert fit.known == 200_000
    assert fit.curve.at(800_000.0) == pytest.approx(TRUE.at(800_000.0), abs=0.03)
    assert " % at 8e+05 steps, " in str(fit)


def test_runs_that_ended_early_are_left_out() -> None:
    """Their validations are all within the first 5 % of the longest run."""
    whole = [curve(0.01, seed, points=50) for seed in range(5)]
    early = run_of([0.2, 0.3], steps=10_000.0)
    assert compute_fit([*whole, early]) == compute_fit(whole)
    alone = compute_fit([whole[0], early, early])
    assert alone is not None and "1 of the 3 runs" in str(alone)


def test_few_runs_or_a_wide_interval_predict_nothing_beyond() -> None:
    one = compute_fit([curve(0.01, 0)])
    assert one is not None and "1 of the 3 runs" in str(one)
    early = compute_fit([curve(0.1, seed, points=7) for seed in range(4)])  # a part that hardly bends
    assert early is not None and early.interval[1] - early.interval[0] > 0.1
    assert "10 are allowed" in str(early)
    assert early.curve.at(60_000.0) == pytest.approx(TRUE.at(60_000.0), abs=0.15)
    assert compute_fit([run_of([0.5, 0.6])]) is None


def test_a_curve_that_has_not_bent_yet_predicts_nothing_however_well_the_runs_agree() -> None:
    """All draws of a bootstrap make the same error: a narrow interval does not show that the asymptote is known."""
    early = compute_fit([curve(0.001, seed, points=12) for seed in range(5)])
    assert early is not None and early.interval[1] - early.interval[0] < 0.1
    assert early.known == 120_000 and 4 * early.curve.middle > early.known
    assert "not predicted: the curve has not flattened: half of its rise takes 4" in str(early)
    assert "at least 4 times as many that are needed 1.2e+05 are known" in str(early)
