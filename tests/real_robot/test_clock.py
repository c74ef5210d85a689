"""The difference of two clocks, read by a thread that loses the processor."""

from __future__ import annotations

import time
from itertools import count

import pytest

from real_robot.ros.clock import offset_s


@pytest.mark.parametrize("lost", ["before", "after"])
def test_time_without_the_processor_is_no_difference_of_the_clocks(lost: str) -> None:
    reading = count()

    def clock_s() -> float:
        if next(reading) == 0 and lost == "before":
            time.sleep(0.1)
        now_s = time.monotonic() + 7.0
        if next(reading) == 1 and lost == "after":
            time.sleep(0.1)
        return now_s

    assert offset_s(clock_s) == pytest.approx(7.0, abs=0.02)
