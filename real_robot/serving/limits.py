"""What a client may ask of the policy server: how large a frame is, how many values it holds, and whose turn it is."""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from real_robot.serving.protocol import Hello, WireError

T = TypeVar("T")

MAX_VALUES = 512  # of one frame: fields, keys and numbers outside of arrays; a request has about a hundred
# Images may be larger than the policy's, as clients of openpi's protocol send what their cameras give.
IMAGE_BYTES = 640 * 480 * 3
OTHER_BYTES = 64 * 2**10
# A client's first answers, about a second of a robot's, and how much later [s of computing] it gets them.
PROBATION = 20
DEBT_S = 1.0

# msgpack (github.com/msgpack/msgpack/blob/master/spec.md): first byte -> bytes of the value, or of its length
_FIXED = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8}
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
_ARRAYS, _MAPS = {0xDC: 2, 0xDD: 4}, {0xDE: 2, 0xDF: 4}
_EMPTY = (0xC0, 0xC2, 0xC3)


def max_frame_bytes(hello: Hello) -> int:
    """Largest frame that a client of this policy needs."""
    height, width = hello.image_size
    numbers = 4 * (hello.state_dim + hello.action_horizon * hello.action_dim)
    return OTHER_BYTES + numbers + len(hello.cameras) * max(IMAGE_BYTES, 3 * height * width)


def check_values(data: bytes) -> None:
    """WireError unless ``data`` is one msgpack value with at most ``MAX_VALUES`` parts.

    Reads only the heads, so a frame that would become millions of objects costs nothing.
    """
    at, left, seen = 0, 1, 0
    while left:
        seen += 1
        if seen > MAX_VALUES or left > MAX_VALUES:
            raise WireError(f"the frame holds more than {MAX_VALUES} values")
        if at >= len(data):
            raise WireError("the frame is not a msgpack message: it ends within a value")
        skipped, more = _head(data, at)
        at, left = at + skipped, left - 1 + more
    if at != len(data):
        raise WireError("the frame is not a msgpack message: it does not end with its value")


def _head(data: bytes, at: int) -> tuple[int, int]:
    """Bytes of the value at ``at`` without the values in it, and how many of those follow."""
    head = data[at]
    if head <= 0x7F or head >= 0xE0 or head in _EMPTY:
        return 1, 0
    if head <= 0x8F:
        return 1, 2 * (head & 0x0F)
    if head <= 0x9F:
        return 1, head & 0x0F
    if head <= 0xBF:
        return 1 + (head & 0x1F), 0
    if head in _FIXED:
        return 1 + _FIXED[head], 0
    size = {**_SIZED, **_ARRAYS, **_MAPS}.get(head)
    if size is None:
        raise WireError("the frame is not a msgpack message: extension types are not used")
    length = int.from_bytes(data[at + 1 : at + 1 + size], "big")
    if head in _SIZED:
        return 1 + size + length, 0
    return 1 + size, length if head in _ARRAYS else 2 * length


@dataclass
class Turn:
    """One client's use of the policy. ``finish_s``: where its last turn ended in the time of ``Turns``."""

    finish_s: float = 0.0
    answers: int = 0


@dataclass
class Turns:
    """One computation at a time, by start-time fair queuing (Goyal, Vin and Cheng 1996).

    Time is counted in seconds of computing: a turn starts where its client's last one ended, or now, which is the start
    of the turn that runs. Of the clients that wait, the one whose turn starts first goes next. Clients with less than
    ``PROBATION`` answers start ``DEBT_S`` later: who connects anew all the time goes behind those that stay, yet not
    for ever.
    """

    _busy: bool = False
    _now_s: float = 0.0
    _waiting: list[tuple[float, int, asyncio.Future[None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    # of its own: in asyncio's pool the computation would wait for a thread behind the frames that others send
    _thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "policy"))

    async def compute(self, turn: Turn, work: Callable[[], T]) -> tuple[T, float]:
        """``work`` in a thread, when it is this client's turn; its result and how long it took [s]."""
        async with self.take(turn):
            began = time.perf_counter()
            result = await asyncio.get_running_loop().run_in_executor(self._thread, work)
            return result, time.perf_counter() - began

    def close(self) -> None:
        """Nothing more is computed; what runs is not waited for."""
        self._thread.shutdown(wait=False)

    @contextlib.asynccontextmanager
    async def take(self, turn: Turn) -> AsyncIterator[None]:
        """The policy, for as long as the block lasts."""
        start_s = max(turn.finish_s, self._now_s)
        if self._busy:
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            key_s = start_s + (DEBT_S if turn.answers < PROBATION else 0.0)
            heapq.heappush(self._waiting, (key_s, next(self._order), mine))
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._next()
                raise
        self._busy = True
        self._now_s = max(self._now_s, start_s)
        began = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            turn.finish_s = start_s + asyncio.get_running_loop().time() - began
            turn.answers += 1
            self._next()

    def _next(self) -> None:
        self._busy = False
        while self._waiting:
            *_, future = heapq.heappop(self._waiting)
            if not future.done():
                self._busy = True
                future.set_result(None)
                return
