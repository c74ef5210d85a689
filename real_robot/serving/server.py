"""A policy in its own process, for one or several robots, over WebSocket.

Requests are computed one at a time; of every client only the newest waiting request is kept, an older one is refused
as superseded. Clients that speak openpi's websocket protocol are served too: an observation map without ``type`` is
answered by ``{"actions": [H, A]}``, or by text that says what is wrong.
"""

from __future__ import annotations

import asyncio
import hmac
import sys
from dataclasses import dataclass
from http import HTTPStatus
from math import ceil
from pathlib import Path
from ssl import SSLContext

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

from real_robot.serving.limits import Turns, max_frame_bytes
from real_robot.serving.protocol import is_loopback
from real_robot.serving.session import ClientSession, ServerMetrics
from real_robot.serving.versions import Versions
from sims.errors import UserError


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """``token``: what clients must present. Addresses other than loopback need ``tls`` too.

    ``max_rate_hz``: requests per second and client, over one second; a client above it, and above twice the policy's
    control rate, is disconnected.
    """

    host: str = "127.0.0.1"
    port: int = 8720
    token: str
    tls: SSLContext | None = None
    max_clients: int = 16
    max_rate_hz: int = 30

    def __post_init__(self) -> None:
        if len(self.token) < 16:
            raise ValueError("the token must have at least 16 characters; make one: openssl rand -hex 16")
        if not is_loopback(self.host) and self.tls is None:
            raise ValueError(f"refusing to listen on {self.host} without TLS; use 127.0.0.1 or give a certificate")


class PolicyServer:
    """``async with PolicyServer(versions, config) as server``: serving while inside, at ``server.port``."""

    def __init__(self, versions: Versions, config: ServerConfig) -> None:
        self.versions, self.config, self.metrics = versions, config, ServerMetrics()
        self._turns = Turns()
        self._clients = 0
        self._server: Server | None = None

    async def __aenter__(self) -> PolicyServer:
        config = self.config
        try:
            self._server = await serve(
                self._serve_client,
                config.host,
                config.port,
                process_request=self._admit,
                max_size=max_frame_bytes(self.versions.current.hello),
                max_queue=1,
                ssl=config.tls,
                compression=None,
                ping_interval=5,
                ping_timeout=10,
                close_timeout=2,  # a client that does not end its side keeps its place for so long
            )
        except OSError as error:
            raise UserError(f"cannot serve: {error.strerror}; choose another --host or --port") from error
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._server is not None
        self._server.close()
        await self._server.wait_closed()
        self._turns.close()

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

    async def _serve_client(self, connection: ServerConnection) -> None:
        self._clients += 1
        session = ClientSession(
            connection,
            self.versions,
            self.metrics,
            turns=self._turns,
            max_rate_hz=max(self.config.max_rate_hz, ceil(2.0 * self.versions.current.hello.control_hz)),
        )
        try:
            await session.run()
        finally:
            self._clients -= 1


async def run_server(versions: Versions, config: ServerConfig, ready: Path | None = None) -> None:
    """Serve until cancelled; the address goes to standard error.

    ``ready``: a file that gets the port number once connections are accepted.
    """
    async with PolicyServer(versions, config) as server:
        scheme = "wss" if config.tls else "ws"
        print(f"serving on {scheme}://{config.host}:{server.port}", file=sys.stderr, flush=True)
        if ready:
            ready.write_text(f"{server.port}\n")
        await asyncio.get_running_loop().create_future()


def _response(status: HTTPStatus, text: str) -> Response:
    body = text.encode()
    headers = Headers({"Content-Type": "text/plain; charset=utf-8", "Content-Length": str(len(body))})
    return Response(status.value, status.phrase, headers, body)
