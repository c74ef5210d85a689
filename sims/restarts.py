"""Episodes that begin again because the simulator failed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from sims.errors import UserError
from sims.vector_env import StartState


class Restarts:
    """How often each episode began again because the simulator failed: one that crashes it would do so for ever."""

    LIMIT = 3

    def __init__(self) -> None:
        self._count = Counter[tuple[int, int]]()

    def add(self, starts: Sequence[StartState]) -> None:
        """These begin again. UserError if one of them has done so ``LIMIT`` times."""
        for start in starts:
            self._count[start.task, start.seed] += 1
            if self._count[start.task, start.seed] > self.LIMIT:
                raise UserError(
                    f"the simulator failed {self.LIMIT + 1} times in the episode of task {start.task} with seed "
                    f"{start.seed}; what it wrote is in the messages above"
                )
