"""The delay between an action's choice and its effect, drawn for every episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Control steps from ``least`` to ``most``, both included. Until the first action takes effect, zeros are sent."""

    least: int = 0
    most: int = 0


def draw_latency(latency: Latency, seed: int) -> int:
    """Of the episode that ``seed`` begins, control steps."""
    return int(np.random.default_rng([seed, 2]).integers(latency.least, latency.most + 1))
