"""The action source of a program that steps the robot."""

from __future__ import annotations

import threading
import time

import numpy as np
from jaxtyping import Float

from real_robot.control.loop import Action
from real_robot.safety.commands import Measurement


class SteppedSource:
    """At most one action waits, none is repeated. ``put`` and ``finish`` block; the control thread never does."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: Action | None = None
        self._num_taken = self._num_idle = 0

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        with self._changed:
            action, self._waiting = self._waiting, None
            self._num_taken += action is not None
            self._num_idle += action is None
            self._changed.notify_all()
        return action

    def executed(self, tick: int, action: Float[np.ndarray, " A"]) -> None:
        """The program records what it stepped."""

    def clear(self) -> None:
        with self._changed:
            self._waiting = None

    def put(self, action: Float[np.ndarray, " A"], timeout_s: float) -> bool:
        """Whether the control loop took it in time; if not, it is withdrawn."""
        with self._changed:
            self._waiting, before = Action(action, time.monotonic()), self._num_taken
            if self._changed.wait_for(lambda: self._num_taken > before, timeout_s):
                return True
            self._waiting = None
            return False

    def finish(self, timeout_s: float) -> bool:
        """Wait until the action taken last has been decided: a control tick without a new one."""
        with self._changed:
            before = self._num_idle
            return self._changed.wait_for(lambda: self._num_idle > before, timeout_s)
