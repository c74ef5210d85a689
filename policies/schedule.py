"""The learning-rate schedule of everything that is fitted."""

from __future__ import annotations

import math

FLOOR = 0.05


def cosine_schedule(step: int, *, steps: int, warmup: int) -> float:
    """Factor on the learning rate: linear warm-up, then half a cosine down to ``FLOOR``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
