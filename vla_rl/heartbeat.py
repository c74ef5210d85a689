"""A sign of life of work that is under way, for the watchdog (vla_rl/runs/watchdog.py)."""

from __future__ import annotations

import time


class _Last:
    """``at_s``: of the clock ``time.perf_counter``."""

    at_s = 0.0


def beat() -> None:
    """This process has gone a step further."""
    _Last.at_s = time.perf_counter()


def last_beat_s() -> float:
    """When, of the clock ``time.perf_counter``."""
    return _Last.at_s
