"""Randomized delay between an action and its effect, drawn for every episode."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sims.numbers.ranges import Count
from sims.numbers.seeding import spawn_seed


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Delay in control steps, uniform in ``least`` .. ``most``. Until the first action takes effect, zeros are sent."""

    least: Count = 0
    most: Count = 0

    def __post_init__(self) -> None:
        if self.most < self.least:
            raise ValueError(f"latency.most must be at least latency.least ({self.least}), got {self.most}")


def draw_latency(latency: Latency, seed: int) -> int:
    """The delay, in control steps, of the episode with this start seed."""
    return int(np.random.default_rng(spawn_seed(seed, "latency")).integers(latency.least, latency.most + 1))
