"""Start states whose seeds never coincide between demonstrations, training, validation and evaluation; and how often
episodes may begin again."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Literal

from sims.errors import UserError
from sims.vector_env import StartState

Stream = Literal["demos", "train", "validation", "evaluation"]
LONGEST_GAP = 10_000  # consecutive starts without a kept episode
_STREAMS: tuple[Stream, ...] = ("demos", "train", "validation", "evaluation")


def start_state(stream: Stream, *, seed: int, index: int, num_tasks: int) -> StartState:
    """Start number ``index`` of a stream; any ``num_tasks`` consecutive starts have each task once.

    The stream's number is in the seed's top bits, so that two streams never have a start in common.
    """
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest()
    number = (_STREAMS.index(stream) << 56) | int.from_bytes(digest, "big")
    return StartState(task=index % num_tasks, seed=number)


class StartSequence:
    """The starts of a stream in order; ``next_index`` is its whole state."""

    def __init__(self, stream: Stream, *, seed: int, num_tasks: int, next_index: int = 0) -> None:
        self.stream, self.seed, self.num_tasks, self.next_index = stream, seed, num_tasks, next_index

    def take(self, count: int) -> list[StartState]:
        first = self.next_index
        self.next_index += count
        return [
            start_state(self.stream, seed=self.seed, index=i, num_tasks=self.num_tasks)
            for i in range(first, first + count)
        ]

    def skip(self, seeds: Collection[int]) -> None:
        """Go on after the last start that has one of ``seeds``; starts further ahead than LONGEST_GAP are not found."""
        index, last = self.next_index, self.next_index - 1
        while index <= last + LONGEST_GAP:
            if start_state(self.stream, seed=self.seed, index=index, num_tasks=self.num_tasks).seed in seeds:
                last = index
            index += 1
        self.next_index = last + 1


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
