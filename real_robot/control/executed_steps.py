"""How many actions an arm had begun to execute when something was observed."""

from __future__ import annotations

from collections import deque


class ExecutedSteps:
    """Actions are decided ahead of their time, so the last ones that were counted are still to come."""

    def __init__(self) -> None:
        self.total = 0
        self._ahead: deque[int] = deque()  # control ticks of the last actions

    def clear(self) -> None:
        """A new episode."""
        self.total = 0
        self._ahead.clear()

    def add(self, tick: int) -> None:
        """The action of control tick ``tick``."""
        self.total += 1
        self._ahead.append(tick)

    def before(self, tick: int) -> int:
        """Number of actions of the ticks before ``tick``, which never falls."""
        while self._ahead and self._ahead[0] < tick:
            self._ahead.popleft()
        return self.total - len(self._ahead)

    def restart_ticks(self) -> None:
        """Control ticks begin anew; what was counted is executed."""
        self._ahead.clear()
