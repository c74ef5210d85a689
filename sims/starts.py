"""Which episode starts where: seeds that never collide between demonstrations, training and evaluation."""

from __future__ import annotations

import hashlib
from typing import Literal

from sims.vector_env import StartState

Stream = Literal["demos", "train", "validation", "evaluation"]
_STREAMS: tuple[Stream, ...] = ("demos", "train", "validation", "evaluation")


def start_state(stream: Stream, *, seed: int, index: int, num_tasks: int) -> StartState:
    """Start number ``index`` of a stream; tasks take turns, so any run of ``num_tasks`` starts holds each once.

    The stream's number fills the seed's top bits: a start of one stream can never be a start of another.
    """
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=7).digest()
    number = (_STREAMS.index(stream) << 56) | int.from_bytes(digest, "big")
    return StartState(task=index % num_tasks, seed=number)


class StartSequence:
    """The starts of a stream in order; ``next_index`` is all the state there is."""

    def __init__(self, stream: Stream, *, seed: int, num_tasks: int, next_index: int = 0) -> None:
        self.stream, self.seed, self.num_tasks, self.next_index = stream, seed, num_tasks, next_index

    def take(self, count: int) -> list[StartState]:
        first = self.next_index
        self.next_index += count
        return [
            start_state(self.stream, seed=self.seed, index=i, num_tasks=self.num_tasks)
            for i in range(first, first + count)
        ]
