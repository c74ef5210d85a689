"""Calibrated probabilities, and how well they are calibrated."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

BINS = 10
NEWTON_STEPS = 50


def platt(logit: Float[Tensor, " N"], truth: Bool[Tensor, " N"]) -> tuple[float, float]:
    """(scale, offset) for which sigmoid(scale * logit + offset) fits ``truth`` best (Platt 1999, Sec. 2.2).

    Targets are (P + 1) / (P + 2) and 1 / (N + 2) for P positives and N negatives, so that data without errors gives
    finite numbers. Newton's method on a convex loss. ValueError without positives or negatives.
    """
    positives, negatives = int(truth.sum()), int((~truth).sum())
    if not positives or not negatives:
        raise ValueError(f"calibration needs positives and negatives, got {positives} and {negatives}")
    target = torch.where(truth, (positives + 1) / (positives + 2), 1 / (negatives + 2)).double()
    inputs = torch.stack([logit.double(), torch.ones(len(logit), dtype=torch.float64)], dim=1)
    weight = torch.zeros(2, dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        probability = torch.sigmoid(inputs @ weight)
        gradient = inputs.T @ (probability - target)
        spread = (probability * (1 - probability))[:, None]
        step = torch.linalg.solve(inputs.T @ (spread * inputs) + 1e-9 * torch.eye(2, dtype=torch.float64), gradient)
        loss = _cross_entropy(inputs @ weight, target)
        while _cross_entropy(inputs @ (weight - step), target) > loss + 1e-12:  # Newton's step went too far
            step = step / 2
        weight = weight - step
    return float(weight[0]), float(weight[1])


def _cross_entropy(logit: Float[Tensor, " N"], target: Float[Tensor, " N"]) -> float:
    return float(F.binary_cross_entropy_with_logits(logit, target, reduction="sum"))


def reliability(probability: Float[Tensor, " N"], truth: Bool[Tensor, " N"]) -> list[dict[str, Any]]:
    """For each of BINS equal intervals of the probability: {probability (mean), share (of positives), count}."""
    which = (probability * BINS).long().clamp(0, BINS - 1)
    rows = []
    for i in range(BINS):
        inside = which == i
        if inside.any():
            mean, share = probability[inside].mean().item(), truth[inside].float().mean().item()
            rows.append({"probability": mean, "share": share, "count": int(inside.sum())})
    return rows


def calibration_error(rows: list[dict[str, Any]]) -> float:
    """Expected calibration error of ``reliability`` (Guo et al. 2017, Eq. 3)."""
    total = sum(row["count"] for row in rows)
    return sum(row["count"] * abs(row["probability"] - row["share"]) for row in rows) / total
