"""Randomized delay between an action and its effect, drawn for every episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Delay in control steps, uniform in ``least`` .. ``most``. Until the first action takes effect, zeros are sent."""

    least: int = 0
    most: int = 0


def draw_latency(latency: Latency, seed: int) -> int:
    """The delay, in control steps, of the episode with this start seed."""
    return int(np.random.default_rng([seed, 2]).integers(latency.least, latency.most + 1))
