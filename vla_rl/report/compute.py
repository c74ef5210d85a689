"""Success as a function of compute: a sigmoid through the validations of runs, which says how far it can be trusted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from sims.numbers.statistics import bootstrap_interval
from vla_rl.report.run_data import RunData

FEWEST_POINTS, FEWEST_RUNS = 6, 3
FARTHEST, WIDEST = 4.0, 0.1  # times the compute that is known; interval of the asymptote
FLATTENED = 4.0  # times the fitted middle: before it all draws of a bootstrap make the same error, and agree
FIRST = 0.05  # share of the compute whose points are left out: they are noise around the start
DRAWS = 200
EXPONENTS = np.geomspace(0.25, 8.0, 24)


@dataclass(frozen=True, kw_only=True)
class Sigmoid:
    """R(C) = start + (asymptote - start) / (1 + (middle / C)^exponent) (Khatri et al. 2025, arXiv:2510.13786).

    C: control steps. R: success.
    """

    start: float
    asymptote: float
    middle: float
    exponent: float

    def at(self, compute: float) -> float:
        return self.start + (self.asymptote - self.start) / (1 + (self.middle / compute) ** self.exponent)


@dataclass(frozen=True, kw_only=True)
class ComputeFit:
    """``interval``: of the asymptote, the middle 95 % of a bootstrap over runs, which few runs make too narrow.

    ``known``: largest compute of a validation.
    ``refused``: why nothing beyond ``known`` is predicted, "" where up to FARTHEST times it may be.
    """

    curve: Sigmoid
    interval: tuple[float, float]
    known: float
    refused: str

    def __str__(self) -> str:
        """What it predicts for FARTHEST times the compute, or why it does not."""
        if self.refused:
            return f"not predicted: {self.refused}"
        steps, (low, high) = FARTHEST * self.known, self.interval
        success = 100 * self.curve.at(steps)
        return f"{success:.1f} % at {steps:.3g} steps, {100 * low:.0f} to {100 * high:.0f} % in the end"


def fit_sigmoid(compute: np.ndarray, success: np.ndarray) -> Sigmoid:
    """Least squares over ``compute`` [N] > 0 and ``success`` [N] in [0, 1].

    On a grid of middle and exponent, where start and asymptote follow in closed form; both within [0, 1].
    """
    middle, exponent = (
        grid.reshape(-1, 1)
        for grid in np.meshgrid(np.geomspace(compute.min() / 4, compute.max() * 4, 48), EXPONENTS, indexing="ij")
    )
    shape = 1 / (1 + (middle / compute) ** exponent)  # [grid, N]
    mean = shape.mean(1)
    centered = shape - mean[:, None]
    rise = np.maximum(0.0, centered @ success / np.maximum(np.square(centered).sum(1), 1e-12))
    start = np.clip(success.mean() - rise * mean, 0, 1)
    rise = np.minimum(rise, 1 - start)
    best = int(np.square(start[:, None] + rise[:, None] * shape - success).sum(1).argmin())
    return Sigmoid(
        start=float(start[best]),
        asymptote=float(start[best] + rise[best]),
        middle=float(middle[best, 0]),
        exponent=float(exponent[best, 0]),
    )


def compute_fit(runs: Sequence[RunData]) -> ComputeFit | None:
    """Of runs that differ in their seed alone. None where they have too few validations."""
    curves = [points for run in runs if len(points := validations(run)) > 1]
    if not curves or sum(map(len, curves)) < FEWEST_POINTS:
        return None
    known = max(points[:, 0].max() for points in curves)
    curves = [late for points in curves if len(late := points[points[:, 0] >= FIRST * known])]
    every = np.concatenate(curves)
    if len(np.unique(every[:, 0])) < FEWEST_POINTS:
        return None
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS if len(curves) >= FEWEST_RUNS else 0):
        chosen = np.concatenate([curves[i] for i in rng.integers(len(curves), size=len(curves))])
        drawn.append(fit_sigmoid(chosen[:, 0], chosen[:, 1]).asymptote)
    low, high = bootstrap_interval(np.array(drawn)) if drawn else (0.0, 1.0)
    curve = fit_sigmoid(every[:, 0], every[:, 1])
    refused = _refusal(len(curves), high - low, curve.middle, known)
    return ComputeFit(curve=curve, interval=(low, high), known=float(known), refused=refused)


def _refusal(runs: int, width: float, middle: float, known: float) -> str:
    if runs < FEWEST_RUNS:
        return f"{runs} of the {FEWEST_RUNS} runs with other seeds that an interval needs"
    if width > WIDEST:
        return f"the asymptote is known to {100 * width:.0f} points only, {100 * WIDEST:.0f} are allowed"
    if known < FLATTENED * middle:
        return (
            f"the curve has not flattened: half of its rise takes {middle:.2g} control steps, and of the at least "
            f"{FLATTENED:g} times as many that are needed {known:.2g} are known"
        )
    return ""


def validations(run: RunData) -> np.ndarray:
    """[N, 2]: control steps so far, success of the validation after them."""
    steps = np.cumsum([record.get("control_steps", 0.0) for record in run.metrics])
    found = [(at, one["validation"]) for at, one in zip(steps, run.metrics, strict=True) if "validation" in one]
    return np.array([(at, success) for at, success in found if at > 0]).reshape(-1, 2)
