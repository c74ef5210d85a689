"""The robot's side of the policy server: send a request, continue with control, and fetch the answer later.

One thread owns the connection. It keeps at most one request, the newest, and reconnects by itself; no method blocks
the control loop.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http import HTTPStatus
from urllib.parse import urlsplit

from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from episodes.overlays import EpisodeOutcome
from real_robot.serving.protocol import (
    MAX_FRAME_BYTES,
    ActRequest,
    Chunk,
    EpisodeEnd,
    Hello,
    Refused,
    WireError,
    is_loopback,
    pack,
    unpack,
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``chunk`` for the request ``id``, or None and why."""

    id: int
    chunk: Chunk | None
    reason: str


class PolicyClient:
    """``timeout_s``: the connection is made anew if the server has not answered by then.

    ValueError if the token would go to another machine without TLS.
    """

    def __init__(self, url: str, *, token: str, timeout_s: float = 2.0, retry_s: float = 0.25) -> None:
        check_url(url)
        self._url, self._token = url, token
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._lock = threading.Condition()
        self._request: ActRequest | None = None
        self._answer: Answer | None = None
        self._episode_end: EpisodeEnd | None = None  # until the server has answered it
        self._hello: Hello | None = None
        self._bound = ""  # fingerprint of the episode's policy
        self._problem = "not connected yet"
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="policy-client", daemon=True)
        self._thread.start()

    @property
    def hello(self) -> Hello | None:
        """Description of the connected policy; None without a connection, and until ``end_episode`` is answered."""
        with self._lock:
            return self._hello

    @property
    def alive(self) -> bool:
        """Whether its thread runs."""
        return self._thread.is_alive()

    def bind(self, fingerprint: str) -> None:
        """Until ``end_episode`` no other policy is accepted, whoever answers at the address. "": any is, again.

        ValueError if another one is connected now.
        """
        with self._lock:
            if fingerprint and self._hello is not None and self._hello.fingerprint != fingerprint:
                raise ValueError(f"the server now offers policy {self._hello.fingerprint[:12]}; begin again")
            self._bound = fingerprint

    @property
    def problem(self) -> str:
        """Why there is no connection; empty while there is one."""
        with self._lock:
            return self._problem

    def ask(self, request: ActRequest) -> None:
        """Replace the waiting request, if any, by this one. Returns at once."""
        with self._lock:
            self._request, self._answer = request, None
            self._lock.notify()

    def poll(self) -> Answer | None:
        """The answer to the last request, once."""
        with self._lock:
            answer, self._answer = self._answer, None
            return answer

    def end_episode(self, outcome: EpisodeOutcome, *, intervened: bool = False) -> None:
        """Report the result of the episode of the policy that was bound, as soon as there is a connection.

        ``hello`` is None until the server has answered with the policy for the next episode. If the connection is lost
        before that, the report is sent again: it may be counted twice, but is not lost.
        """
        with self._lock:
            self._episode_end = EpisodeEnd(fingerprint=self._bound, outcome=outcome, intervened=int(intervened))
            self._bound = ""
            self._hello, self._problem = None, "the server has not yet named the policy for the next episode"
            self._request = self._answer = None
            self._lock.notify()

    def close(self) -> None:
        """Returns soon; a connection that is waiting for its server ends by itself."""
        with self._lock:
            self._closing = True
            self._lock.notify()
        self._thread.join(timeout=0.5)

    def _run(self) -> None:
        while not self._closing:
            try:
                header = {"Authorization": f"Bearer {self._token}"}
                with connect(
                    self._url, additional_headers=header, max_size=MAX_FRAME_BYTES, open_timeout=self._timeout_s,
                    close_timeout=0.2, compression=None,
                ) as connection:  # fmt: skip
                    self._use(connection)
            except (OSError, WebSocketException, WireError) as error:
                self._on_lost(_reason(error))
            with self._lock:
                self._lock.wait_for(lambda: self._closing, self._retry_s)

    def _use(self, connection: ClientConnection) -> None:
        self._on_hello(_receive(connection, self._timeout_s))
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closing or self._request or self._episode_end, 0.5)
                request, self._request = self._request, None
                end = self._episode_end
            if end is not None:
                self._send_episode_end(connection, end)
            elif self._closing:
                return
            elif request is not None:
                self._send_request(connection, request)
            else:
                connection.ping()

    def _send_episode_end(self, connection: ClientConnection, end: EpisodeEnd) -> None:
        connection.send(pack(end))
        reply = _receive(connection, self._timeout_s)
        while not isinstance(reply, Hello):
            reply = _receive(connection, self._timeout_s)
        with self._lock:
            self._episode_end = None
        self._on_hello(reply)

    def _send_request(self, connection: ClientConnection, request: ActRequest) -> None:
        connection.send(pack(request))
        reply = _receive(connection, self._timeout_s)
        while getattr(reply, "id", None) != request.id:
            reply = _receive(connection, self._timeout_s)
        chunk = reply if isinstance(reply, Chunk) else None
        reason = reply.reason if isinstance(reply, Refused) else ""
        answer = Answer(id=request.id, chunk=chunk, reason=reason)
        with self._lock:
            if self._request is None:
                self._answer = answer

    def _on_hello(self, hello: object) -> None:
        if not isinstance(hello, Hello):
            raise WireError(f"expected a hello, got {hello}")
        with self._lock:
            if self._bound and hello.fingerprint != self._bound:
                raise WireError(
                    f"the server now offers policy {hello.fingerprint[:12]}, this episode began with "
                    f"{self._bound[:12]}; end the episode to change over"
                )
            if self._episode_end is None:
                self._hello, self._problem = hello, ""

    def _on_lost(self, reason: str) -> None:
        """The request under way is answered with the failure, so that it can be sent again."""
        with self._lock:
            self._hello, self._problem = None, reason
            self._answer = Answer(id=-1, chunk=None, reason=reason)
            self._request = None


def check_url(url: str) -> None:
    """ValueError unless it is wss://, or ws:// to this machine."""
    parts = urlsplit(url)
    try:
        _ = parts.port
    except ValueError as error:
        raise ValueError(f"policy server {url!r}: {error}") from error
    if parts.scheme not in ("ws", "wss") or not parts.hostname:
        raise ValueError(f"policy server {url!r}: expected ws://HOST:PORT or wss://HOST:PORT")
    if parts.scheme == "ws" and not is_loopback(parts.hostname):
        raise ValueError(
            f"policy server {url!r}: the token would be sent to another machine unencrypted; use wss://, or an SSH "
            f"tunnel: ssh -L 8720:localhost:8720 {parts.hostname}, then ws://127.0.0.1:8720"
        )


def _reason(error: Exception) -> str:
    if not isinstance(error, InvalidStatus):
        return f"{type(error).__name__}: {error}"
    status, said = error.response.status_code, (error.response.body or b"")[:200].decode(errors="replace").strip()
    hint = "; give the token file of the server (--token-file)" if status == HTTPStatus.UNAUTHORIZED else ""
    return f"the server refuses: HTTP {status}, {said}{hint}"


def _receive(connection: ClientConnection, timeout_s: float) -> object:
    data = connection.recv(timeout=timeout_s)
    if not isinstance(data, bytes):
        raise WireError(f"expected a binary frame, got text: {data[:200]!r}")
    return unpack(data)
