"""A policy in its own process, for one robot or several, over WebSocket.

Inference is one thread, so two questions never slow each other down; of every client only the newest waiting question
is kept, an older one is refused as superseded. Clients that speak openpi's websocket protocol are served too: an
observation map without ``type``, answered by ``{"actions": [H, A]}``, or by text that says what is wrong.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import ipaddress
import sys
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from ssl import SSLContext
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request, Response

from real_robot.serving.protocol import (
    MAX_FRAME_BYTES,
    Act,
    Chunk,
    Ended,
    Hello,
    Refused,
    WireError,
    message_of,
    pack,
    pack_map,
    unpack_map,
)


class Backend(Protocol):
    """Something that answers. ``act`` raises ValueError if the question does not fit the policy."""

    hello: Hello

    def act(self, question: Act) -> NDArray[np.float32]: ...


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """``token``: what clients must present. Addresses other than loopback need ``tls`` too.

    ``max_rate_hz``: questions per second and client, over one second; a client above it is disconnected.
    """

    host: str = "127.0.0.1"
    port: int = 8720
    token: str
    tls: SSLContext | None = None
    max_clients: int = 4
    max_rate_hz: int = 100

    def __post_init__(self) -> None:
        if len(self.token) < 16:
            raise ValueError("the token must have at least 16 characters; make one: openssl rand -hex 16")
        if not _is_loopback(self.host) and self.tls is None:
            raise ValueError(f"refusing to listen on {self.host} without TLS; use 127.0.0.1 or give a certificate")


_COUNTERS = ("chunks", "refused", "superseded", "rejected_connections", "episodes", "rollbacks")


@dataclass
class Metrics:
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
            for share in (0.5, 0.99):
                seconds = float(np.quantile(list(self.inference_s), share))
                lines.append(f'policy_inference_seconds{{quantile="{share}"}} {seconds:.6f}')
        return "\n".join(lines) + "\n"


class Offer(Protocol):
    """Which backend serves: ``real_robot.serving.versions.Versions``."""

    @property
    def current(self) -> Backend: ...
    def report(self, fingerprint: str, ended: Ended) -> str: ...


class PolicyServer:
    """``async with PolicyServer(offer, config) as server``: serving while inside, at ``server.port``.

    A client keeps the backend it was greeted with until it says that its episode has ended.
    """

    def __init__(self, offer: Offer, config: ServerConfig) -> None:
        self.offer, self.config, self.metrics = offer, config, Metrics()
        self._one_at_a_time = asyncio.Lock()
        self._clients = 0
        self._server: Server | None = None

    async def __aenter__(self) -> PolicyServer:
        config = self.config
        self._server = await serve(
            self._client, config.host, config.port, process_request=self._admit, max_size=MAX_FRAME_BYTES,
            max_queue=4, ssl=config.tls, compression=None, ping_interval=5, ping_timeout=10,
        )  # fmt: skip
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    def _admit(self, connection: ServerConnection, request: Request) -> Response | None:
        """Health and metrics for anyone, the policy for holders of the token; browsers (Origin) are refused."""
        if request.path == "/healthz":
            return _response(HTTPStatus.OK, "ok\n")
        if request.path == "/metrics":
            return _response(HTTPStatus.OK, self.metrics.text())
        # openpi's clients send "Api-Key TOKEN"
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").removeprefix("Api-Key ")
        refusal = None
        if not hmac.compare_digest(given.encode(), self.config.token.encode()):
            refusal = HTTPStatus.UNAUTHORIZED, "wrong or missing token: send the header 'Authorization: Bearer TOKEN'\n"
        elif "Origin" in request.headers:
            refusal = HTTPStatus.FORBIDDEN, "not for browsers\n"
        elif self._clients >= self.config.max_clients:
            refusal = HTTPStatus.SERVICE_UNAVAILABLE, f"already {self._clients} clients\n"
        if refusal is None:
            return None
        self.metrics.rejected_connections += 1
        return _response(*refusal)

    async def _client(self, connection: ServerConnection) -> None:
        self._clients += 1
        waiting: asyncio.Queue[bytes] = asyncio.Queue(maxsize=1)
        backend = self.offer.current
        answering = asyncio.create_task(self._answer_all(connection, waiting, backend))
        try:
            await connection.send(pack(backend.hello))
            await self._listen(connection, waiting)
        except ConnectionClosed:
            pass
        finally:
            self._clients -= 1
            answering.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                await answering

    async def _listen(self, connection: ServerConnection, waiting: asyncio.Queue[bytes]) -> None:
        """Keep the newest question; close on text frames and floods."""
        arrivals: deque[float] = deque(maxlen=self.config.max_rate_hz)
        async for data in connection:
            now = time.monotonic()
            if len(arrivals) == arrivals.maxlen and now - arrivals[0] < 1.0:
                return await connection.close(1008, f"more than {self.config.max_rate_hz} questions per second")
            arrivals.append(now)
            if not isinstance(data, bytes):
                return await connection.close(1003, "binary frames only")
            if waiting.full():
                await self._refuse(connection, waiting.get_nowait(), "superseded by a newer question")
                self.metrics.superseded += 1
            waiting.put_nowait(data)
        return None

    async def _answer_all(self, connection: ServerConnection, waiting: asyncio.Queue[bytes], backend: Backend) -> None:
        while True:
            data = await waiting.get()
            try:
                backend = await self._answer(connection, data, backend)
            except ValueError as error:  # WireError, or a question that does not fit the policy
                await self._refuse(connection, data, str(error))

    async def _answer(self, connection: ServerConnection, data: bytes, backend: Backend) -> Backend:
        """Answer one message; the backend for the next."""
        fields = unpack_map(data)
        foreign = "type" not in fields
        question = act_of_openpi(fields, backend.hello) if foreign else message_of(fields)
        if isinstance(question, Ended):
            return await self._next_episode(connection, question, backend)
        if not isinstance(question, Act):
            raise WireError(f"a client sends 'act' or 'ended', not {fields['type']!r}")
        async with self._one_at_a_time:
            began = time.perf_counter()
            actions = await asyncio.to_thread(backend.act, question)
            inference_s = time.perf_counter() - began
        self.metrics.chunks += 1
        self.metrics.inference_s.append(inference_s)
        if foreign:
            timing = {"infer_ms": 1000.0 * inference_s}
            await connection.send(pack_map({"actions": actions, "server_timing": timing}))
        else:
            await connection.send(pack(Chunk(id=question.id, actions=actions, inference_s=inference_s)))
        return backend

    async def _next_episode(self, connection: ServerConnection, ended: Ended, backend: Backend) -> Backend:
        if news := self.offer.report(backend.hello.fingerprint, ended):
            self.metrics.rollbacks += 1
            print(news, file=sys.stderr)
        self.metrics.episodes += 1
        chosen = self.offer.current
        await connection.send(pack(chosen.hello))
        return chosen

    async def _refuse(self, connection: ServerConnection, data: bytes, reason: str) -> None:
        """openpi's clients take text for an error, ours take ``Refused``."""
        self.metrics.refused += 1
        fields: dict[str, Any] = {"type": "unreadable"}
        with contextlib.suppress(WireError):
            fields = unpack_map(data)
        identity = fields.get("id")
        refused = Refused(id=identity if isinstance(identity, int) else -1, reason=reason)
        await connection.send(pack(refused) if "type" in fields else reason)


def act_of_openpi(fields: Mapping[str, Any], hello: Hello) -> Act:
    """An openpi observation: ``observation/state``, ``observation/<camera>`` for each camera, ``prompt``."""
    needed = ["observation/state", *(f"observation/{camera}" for camera in hello.cameras), "prompt"]
    missing = [key for key in needed if key not in fields]
    if missing:
        raise WireError(f"the observation lacks {missing}; this policy needs {needed}")
    return message_of(  # type: ignore[return-value]
        {
            "type": "act",
            "id": 0,
            "images": {camera: fields[f"observation/{camera}"] for camera in hello.cameras},
            "state": np.asarray(fields["observation/state"], dtype=np.float32),
            "instruction": fields["prompt"],
            "method": "replace",
            "leftover": np.zeros((0, hello.action_dim), dtype=np.float32),
            "delay": 0,
            "execute_steps": hello.action_horizon,
        }
    )


async def run_server(offer: Offer, config: ServerConfig, ready: Path | None = None) -> None:
    """Serve until cancelled; the address goes to standard error.

    ``ready``: a file that gets the port number once connections are accepted.
    """
    async with PolicyServer(offer, config) as server:
        scheme = "wss" if config.tls else "ws"
        print(f"serving on {scheme}://{config.host}:{server.port}", file=sys.stderr, flush=True)
        if ready:
            ready.write_text(f"{server.port}\n")
        await asyncio.get_running_loop().create_future()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _response(status: HTTPStatus, text: str) -> Response:
    body = text.encode()
    headers = Headers({"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))})
    return Response(status.value, status.phrase, headers, body)
