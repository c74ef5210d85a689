"""The robot's side of the policy server: ask, go on with control, and look later whether the answer is there.

One thread owns the connection. It keeps at most one question, the newest, and reconnects by itself; nothing here ever
makes the control loop wait.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from websockets.exceptions import WebSocketException
from websockets.sync.client import ClientConnection, connect

from real_robot.serving.protocol import (
    MAX_FRAME_BYTES,
    PROTOCOL,
    Act,
    Chunk,
    Ended,
    Hello,
    Outcome,
    Refused,
    WireError,
    pack,
    unpack,
)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``chunk`` for the question ``id``, or None and why. ``round_trip_s`` from ``ask`` to here."""

    id: int
    chunk: Chunk | None
    reason: str
    round_trip_s: float


class PolicyClient:
    """``timeout_s``: a server that has not answered by then is treated as dead, and the connection made anew."""

    def __init__(self, url: str, *, token: str, timeout_s: float = 2.0, retry_s: float = 0.25) -> None:
        self._url, self._token = url, token
        self._timeout_s, self._retry_s = timeout_s, retry_s
        self._lock = threading.Condition()
        self._question: tuple[Act, float] | None = None
        self._answer: Answer | None = None
        self._ended: Ended | None = None
        self._hello: Hello | None = None
        self._trouble = "not connected yet"
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="policy-client", daemon=True)
        self._thread.start()

    @property
    def hello(self) -> Hello | None:
        """What the connected policy is; None without a connection, and until ``end_episode`` is answered."""
        with self._lock:
            return self._hello

    @property
    def trouble(self) -> str:
        """Why there is no connection; empty while there is one."""
        with self._lock:
            return self._trouble

    def ask(self, act: Act) -> None:
        """Replace the waiting question, if any, by this one. Returns at once."""
        with self._lock:
            self._question, self._answer = (act, time.monotonic()), None
            self._lock.notify()

    def poll(self) -> Answer | None:
        """The answer to the last question, once."""
        with self._lock:
            answer, self._answer = self._answer, None
            return answer

    def end_episode(self, outcome: Outcome, *, intervened: bool = False) -> None:
        """Report how the episode went. ``hello`` is None until the server names the policy for the next one."""
        with self._lock:
            self._ended = Ended(outcome=outcome, intervened=int(intervened))
            self._hello, self._trouble = None, "the server has not yet said which policy is next"
            self._question = self._answer = None
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
                    self._converse(connection)
            except (OSError, WebSocketException, WireError) as error:
                self._lost(f"{type(error).__name__}: {error}")
            with self._lock:
                self._lock.wait_for(lambda: self._closing, self._retry_s)

    def _converse(self, connection: ClientConnection) -> None:
        self._greet(_receive(connection, self._timeout_s))
        while True:
            with self._lock:
                self._lock.wait_for(lambda: self._closing or self._question or self._ended, 0.5)
                question, self._question = self._question, None
                ended, self._ended = self._ended, None
            if self._closing:
                return
            if ended is not None:
                connection.send(pack(ended))
                reply = _receive(connection, self._timeout_s)
                while not isinstance(reply, Hello):
                    reply = _receive(connection, self._timeout_s)
                self._greet(reply)
                continue
            if question is None:
                connection.ping()
                continue
            act, asked_s = question
            connection.send(pack(act))
            reply = _receive(connection, self._timeout_s)
            while getattr(reply, "id", None) != act.id:
                reply = _receive(connection, self._timeout_s)
            chunk = reply if isinstance(reply, Chunk) else None
            reason = reply.reason if isinstance(reply, Refused) else ""
            self._reply(Answer(id=act.id, chunk=chunk, reason=reason, round_trip_s=time.monotonic() - asked_s))

    def _greet(self, hello: object) -> None:
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            raise WireError(f"expected a hello of protocol {PROTOCOL}, got {hello}")
        with self._lock:
            self._hello, self._trouble = hello, ""

    def _reply(self, answer: Answer) -> None:
        with self._lock:
            if self._question is None:
                self._answer = answer

    def _lost(self, reason: str) -> None:
        """Whatever was asked is answered with the failure, so that the asker can ask again."""
        with self._lock:
            self._hello, self._trouble = None, reason
            self._answer = Answer(id=-1, chunk=None, reason=reason, round_trip_s=0.0)
            self._question = self._ended = None


def _receive(connection: ClientConnection, timeout_s: float) -> object:
    data = connection.recv(timeout=timeout_s)
    if not isinstance(data, bytes):
        raise WireError(f"expected a binary frame, got text: {data[:200]!r}")
    return unpack(data)
