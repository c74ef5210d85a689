"""How far one clock is ahead of the monotonic one."""

from __future__ import annotations

import time
from collections.abc import Callable

# A reading in which less time passed is as good as it gets.
_CLOSE_S = 0.0005
_READINGS = 5


def offset_s(clock_s: Callable[[], float]) -> float:
    """``clock_s`` less the monotonic clock [s], by the closest of a few readings.

    Between the readings of two clocks a thread may lose the processor: that time is no difference of the clocks.
    """
    readings = []
    for _ in range(_READINGS):
        before_s, read_s, after_s = time.monotonic(), clock_s(), time.monotonic()
        readings.append((after_s - before_s, read_s - 0.5 * (before_s + after_s)))
        if readings[-1][0] < _CLOSE_S:
            break
    return min(readings)[1]
