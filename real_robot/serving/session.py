"""One client of the policy server: its messages, the policy version of its episode, and the policy's memory.

The version and the memory are kept for a whole episode. An episode begins with the connection and ends with the
client's ``ended``; clients that speak openpi's protocol send no such message, so their connection is one episode.
A version that is rolled back before the first request of an episode does not drive it: the connection is closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
import traceback
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.server import ServerConnection
from websockets.exceptions import ConnectionClosed

from real_robot.serving.backends import UnusableActions
from real_robot.serving.limits import Turn, Turns, check_values
from real_robot.serving.openpi import is_openpi, request_of_openpi
from real_robot.serving.protocol import (
    ActRequest,
    Chunk,
    EpisodeEnd,
    Message,
    Refused,
    WireError,
    message_of,
    pack,
    pack_map,
    unpack_map,
)
from real_robot.serving.versions import Versions
from sims.tensor_dataclass import TensorDataclass

SUPERSEDED_PAUSE_S = 0.02
ROLLED_BACK_POLL_S = 0.2
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
    """``turns``: shared by all clients, so that one request is computed at a time and nobody waits for the greedy."""

    def __init__(
        self,
        connection: ServerConnection,
        versions: Versions,
        metrics: ServerMetrics,
        *,
        turns: Turns,
        max_rate_hz: int,
    ) -> None:
        self._connection, self._versions, self._metrics = connection, versions, metrics
        self._turns, self._turn, self._max_rate_hz = turns, Turn(), max_rate_hz
        self._waiting: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        self._start_episode()

    async def run(self) -> None:
        """Until the connection is closed."""
        tasks = [asyncio.create_task(self._answer_all()), asyncio.create_task(self._close_when_rolled_back())]
        try:
            await self._connection.send(pack(self._backend.hello))
            await self._receive()
        except ConnectionClosed:
            pass
        finally:
            for task in tasks:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                    await task

    def _start_episode(self) -> None:
        self._backend = self._versions.current
        self._state = self._backend.initial_state()
        self._begun = False  # with its first request

    def _may_not_begin(self) -> bool:
        return not self._begun and self._versions.was_replaced(self._backend.hello.fingerprint)

    async def _close_when_rolled_back(self) -> None:
        """Before the episode begins, so that the client connects again and begins it with the version that serves."""
        while not self._may_not_begin():
            await asyncio.sleep(ROLLED_BACK_POLL_S)
        await self._connection.close(1012, "the policy was rolled back")

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
            superseded = self._waiting.full()
            if superseded:
                await self._refuse(self._waiting.get_nowait(), "superseded by a newer request")
                self._metrics.superseded += 1
            self._waiting.put_nowait(data)
            if superseded:  # read more slowly: a crowd that sends faster than it is answered does not delay others
                await asyncio.sleep(SUPERSEDED_PAUSE_S)
        return None

    async def _answer_all(self) -> None:
        while True:
            data = await self._waiting.get()
            try:
                await self._answer(data)
            except ConnectionClosed:
                return
            except UnusableActions as error:
                self._report_fault(str(error))
                await self._refuse(data, str(error))
            except ValueError as error:  # WireError, or a request that does not fit the policy
                await self._refuse(data, str(error))
            except Exception as error:  # of one request; neither this connection nor another may suffer from it
                traceback.print_exc()
                await self._refuse(data, f"the server failed: {type(error).__name__}: {error}")

    async def _answer(self, data: bytes) -> None:
        check_values(data)
        fields, message = await asyncio.to_thread(self._read, data)
        openpi = is_openpi(fields)
        if isinstance(message, EpisodeEnd):
            return await self._end_episode(message)
        if not isinstance(message, ActRequest):
            raise WireError(f"a client sends 'act' or 'ended', not {fields['type']!r}")
        if self._may_not_begin():
            raise WireError(f"policy {self._backend.hello.fingerprint[:12]} was rolled back")
        self._begun = True
        (actions, self._state), inference_s = await self._turns.compute(self._turn, lambda: self._act(message))
        self._metrics.chunks += 1
        self._metrics.inference_s.append(inference_s)
        if openpi:
            timing = {"infer_ms": 1000.0 * inference_s}
            reply = pack_map({"actions": actions, "server_timing": timing})
        else:
            reply = pack(Chunk(id=message.id, actions=actions, inference_s=inference_s))
        return await self._connection.send(reply)

    def _act(self, request: ActRequest) -> tuple[NDArray[np.float32], TensorDataclass]:
        state = self._backend.forget_plan(self._state) if request.anew else self._state
        return self._backend.act(request, state)

    def _read(self, data: bytes) -> tuple[dict[str, Any], Message]:
        fields = unpack_map(data)
        return fields, request_of_openpi(fields, self._backend.hello) if is_openpi(fields) else message_of(fields)

    def _report_fault(self, reason: str) -> None:
        """The policy cannot be used; the one before it serves the next episodes."""
        if rollback := self._versions.report_fault(self._backend.hello.fingerprint, reason):
            self._metrics.rollbacks += 1
            print(rollback, file=sys.stderr)

    async def _end_episode(self, end: EpisodeEnd) -> None:
        """Count the result and greet the client with the policy for the next episode."""
        if rollback := self._versions.report(end):
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
            check_values(data)  # few values, so reading them here costs less than a thread
            fields = unpack_map(data)
        request_id = fields.get("id")
        refused = Refused(id=request_id if isinstance(request_id, int) else -1, reason=reason)
        await self._connection.send(reason if is_openpi(fields) else pack(refused))
