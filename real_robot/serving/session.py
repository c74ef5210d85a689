"""One client of the policy server: its messages, the policy version of its episode, and the policy's memory.

The version and the memory are kept for a whole episode. An episode begins with the connection and ends with the
client's ``ended``; clients that speak openpi's protocol send no such message, so their connection is one episode.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from real_robot.serving.openpi import is_openpi, request_of_openpi
from real_robot.serving.protocol import (
    ActRequest,
    Chunk,
    EpisodeEnd,
    Refused,
    WireError,
    message_of,
    pack,
    pack_map,
    unpack_map,
)
from real_robot.serving.versions import Versions

_COUNTERS = ("chunks", "refused", "superseded", "rejected_connections", "episodes", "rollbacks")


@dataclass
class ServerMetrics:
    """Counters since the start, in Prometheus' text format at /metrics."""

    chunks: int = 0
    refused: int = 0
    superseded: int = 0
    rejected_connections: int = 0
    episodes: int = 0
    rollbacks: int = 0
    inference_s: deque[float] = field(default_factory=lambda: deque(maxlen=1000))

    def text(self) -> str:
        lines = [f"policy_{name}_total {getattr(self, name)}" for name in _COUNTERS]
        if self.inference_s:
            for quantile in (0.5, 0.99):
                seconds = float(np.quantile(list(self.inference_s), quantile))
                lines.append(f'policy_inference_seconds{{quantile="{quantile}"}} {seconds:.6f}')
        return "\n".join(lines) + "\n"


class ClientSession:
    """``inference``: the lock that all clients share, so that only one request is computed at a time."""

    def __init__(
        self,
        connection: ServerConnection,
        versions: Versions,
        metrics: ServerMetrics,
        *,
        inference: asyncio.Lock,
        max_rate_hz: int,
    ) -> None:
        self._connection, self._versions, self._metrics = connection, versions, metrics
        self._inference, self._max_rate_hz = inference, max_rate_hz
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        self._start_episode()

    async def run(self) -> None:
        """Until the connection is closed."""
        answering = asyncio.create_task(self._answer_all())
        try:
            await self._connection.send(pack(self._backend.hello))
            await self._receive()
        except ConnectionClosed:
            pass
        finally:
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                await answering

    def _start_episode(self) -> None:
        self._backend = self._versions.current
        self._state = self._backend.initial_state()

    async def _receive(self) -> None:
        """Keep the newest request; close on text frames and above the maximal rate."""
        arrivals: deque[float] = deque(maxlen=self._max_rate_hz)
        async for data in self._connection:
            now = time.monotonic()
            if len(arrivals) == arrivals.maxlen and now - arrivals[0] < 1.0:
                return await self._connection.close(1008, f"more than {self._max_rate_hz} requests per second")
            arrivals.append(now)
            if not isinstance(data, bytes):
                return await self._connection.close(1003, "binary frames only")
            if self._waiting.full():
                await self._refuse(self._waiting.get_nowait(), "superseded by a newer request")
                self._metrics.superseded += 1
            self._waiting.put_nowait(data)
        return None

    async def _answer_all(self) -> None:
        while True:
            data = await self._waiting.get()
            try:
                await self._answer(data)
            except ValueError as error:  # WireError, or a request that does not fit the policy
                await self._refuse(data, str(error))

    async def _answer(self, data: bytes) -> None:
        fields = unpack_map(data)
        openpi = is_openpi(fields)
        message = request_of_openpi(fields, self._backend.hello) if openpi else message_of(fields)
        if isinstance(message, EpisodeEnd):
            return await self._end_episode(message)
        if not isinstance(message, ActRequest):
            raise WireError(f"a client sends 'act' or 'ended', not {fields['type']!r}")
        async with self._inference:
            started = time.perf_counter()
            actions, self._state = await asyncio.to_thread(self._backend.act, message, self._state)
            inference_s = time.perf_counter() - started
        self._metrics.chunks += 1
        self._metrics.inference_s.append(inference_s)
        if openpi:
            timing = {"infer_ms": 1000.0 * inference_s}
            reply = pack_map({"actions": actions, "server_timing": timing})
        else:
            reply = pack(Chunk(id=message.id, actions=actions, inference_s=inference_s))
        return await self._connection.send(reply)

    async def _end_episode(self, end: EpisodeEnd) -> None:
        """Count the result and greet the client with the policy for the next episode."""
        if rollback := self._versions.report(self._backend.hello.fingerprint, end):
            self._metrics.rollbacks += 1
            print(rollback, file=sys.stderr)
        self._metrics.episodes += 1
        self._start_episode()
        await self._connection.send(pack(self._backend.hello))

    async def _refuse(self, data: bytes, reason: str) -> None:
        """As text, which openpi's clients take for an error, or as ``Refused``."""
        self._metrics.refused += 1
        fields: dict[str, Any] = {"type": "unreadable"}
        with contextlib.suppress(WireError):
            fields = unpack_map(data)
        request_id = fields.get("id")
        refused = Refused(id=request_id if isinstance(request_id, int) else -1, reason=reason)
        await self._connection.send(reason if is_openpi(fields) else pack(refused))
