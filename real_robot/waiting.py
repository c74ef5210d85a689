"""Waiting for an arm, its sensors and what a person holds."""

from __future__ import annotations

import time
from collections.abc import Callable

from real_robot.robot_file import RobotError

POLL_S = 0.005


def wait_until_ready(
    condition: Callable[[], bool], problem: Callable[[], str], *, within_s: float, what: str = "the arm"
) -> None:
    """Return when ``condition`` holds. RobotError with ``problem`` of ``what`` if it does not ``within_s``."""
    deadline_s = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise RobotError(f"{what} is not ready after {within_s:g} s: {problem()}")
        time.sleep(POLL_S)
