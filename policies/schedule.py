"""The learning-rate schedule of everything that is fitted."""

from __future__ import annotations

import math


def cosine_schedule(step: int, *, steps: int, warmup: int, floor: float = 0.05) -> float:
    """Factor on the learning rate: linear warm-up, then half a cosine down to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
