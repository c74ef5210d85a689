"""The action source of a program that steps the robot."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np
from jaxtyping import Float

from real_robot.control.loop import Action
from real_robot.safety.commands import Measurement


class SteppedSource:
    """Actions are taken in the order of ``put``, one a control tick, none is repeated.

    ``waiting``: that may still wait when ``put`` returns. ``put`` and ``finish`` block; the control thread never does.
    """

    def __init__(self, *, waiting: int = 0) -> None:
        self._changed, self._may_wait = threading.Condition(), waiting
        self._waiting: deque[Action] = deque()
        self._num_taken = self._num_idle = self._num_cleared = 0

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        with self._changed:
            action = self._waiting.popleft() if self._waiting else None
            self._num_taken += action is not None
            self._num_idle += action is None
            self._changed.notify_all()
        return action

    def executed(self, tick: int, action: Float[np.ndarray, " A"]) -> None:
        """The program records what it stepped."""

    def clear(self) -> None:
        with self._changed:
            self._waiting.clear()
            self._num_cleared += 1
            self._changed.notify_all()

    def put(self, action: Float[np.ndarray, " A"], timeout_s: float) -> bool:
        """Whether the control loop took actions in time, so that no more wait than may; if not, or if they are cleared
        meanwhile, all are withdrawn.
        """
        with self._changed:
            self._waiting.append(Action(action, time.monotonic()))
            due = self._num_taken + len(self._waiting) - self._may_wait
            cleared = self._num_cleared
            self._changed.wait_for(lambda: self._num_taken >= due or self._num_cleared > cleared, timeout_s)
            if self._num_taken >= due:
                return True
            self._waiting.clear()
            return False

    def finish(self, timeout_s: float) -> bool:
        """Wait until the action taken last has been decided: a control tick without a new one, or ``clear``."""
        with self._changed:
            before = self._num_idle + self._num_cleared
            return self._changed.wait_for(lambda: self._num_idle + self._num_cleared > before, timeout_s)
