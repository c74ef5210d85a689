"""A program that corrects as a person would: over the browser's own connection, by the simulator's expert.

For tests and benchmarks. The server must run with ``control.show_expert`` and ``control.wait_for_input``, so that no
step of the simulator waits for a slow machine and none goes by without the operator.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from websockets.sync.client import ClientConnection, connect

from real_robot.corrections.session import ENDED

State = dict[str, Any]
HEARTBEAT_S = 0.1


def open_session(address: str) -> tuple[str, str]:
    """Exchange the token of a printed address for a session: (origin, cookie). ValueError if refused."""
    parts = urlsplit(address)
    connection = http.client.HTTPConnection(parts.netloc, timeout=30)
    try:
        connection.request("GET", f"/?{parts.query}")
        answer = connection.getresponse()
        cookie = answer.getheader("Set-Cookie") or ""
    finally:
        connection.close()
    if answer.status != 303:
        raise ValueError(f"the server refused the token: {answer.status}")
    return f"{parts.scheme}://{parts.netloc}", cookie.partition(";")[0]


def open_control(origin: str, cookie: str) -> ClientConnection:
    """The control connection of a session, as the page opens it."""
    headers = {"Cookie": cookie, "Origin": origin}
    return connect(origin.replace("http", "ws", 1) + "/ws/control", additional_headers=headers, max_size=2**22)


@dataclass(frozen=True, kw_only=True)
class TakeOverAfter:
    """When this operator intervenes: once the policy has had so many steps of an episode without success."""

    steps: int

    def __call__(self, state: State) -> bool:
        return int(state["step"]) >= self.steps


class ScriptedOperator:
    """``with ScriptedOperator(...) as operator``; ``needs_help``: whether to take over, from what the page shows."""

    def __init__(self, address: str, needs_help: Callable[[State], bool]) -> None:
        self._connection = open_control(*open_session(address))
        self._needs_help = needs_help
        self.state: State = {}
        self._unread: State | None = None  # that came, and was not acted on yet
        self._input: dict[str, Any] = {"deadman": False}

    def __enter__(self) -> ScriptedOperator:
        self._socket = self._connection.__enter__()
        self._token = self._acquire()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._connection.__exit__(*exception)

    def correct(self, episodes: int) -> list[dict[str, Any]]:
        """Watch and correct as many episodes; {episode, corrected, success} of each."""
        done: list[dict[str, Any]] = []
        while len(done) < episodes:
            state = self._next_state()
            if state["mode"] == "ended":
                done.append(self._ended(state))
                self._do("success" if state["outcome"] == "success" else "failure")
                self._do("next")
                while (new := self._next_state())["episode"] == state["episode"]:
                    pass
                self._unread = new
            elif state["mode"] == "policy" and self._needs_help(state):
                self._do("take_over")
            elif state["mode"] == "hold":
                self._do("take_over" if self._needs_help(state) else "hand_back")
            else:
                self._send_input(state, drive=state["mode"] == "human")
        return done

    def _send_input(self, state: State, *, drive: bool) -> None:
        device = [max(-1.0, min(1.0, value)) for value in state["expert"]] if drive else []
        self._input = {"deadman": drive, "device": device, "step": state["step"]}
        self._send(type="input", token=self._token, **self._input)

    @staticmethod
    def _ended(state: State) -> dict[str, Any]:
        return {
            "episode": state["stored_as"],
            "task": state["task"],
            "corrected": "h" in state["actors"],
            "success": state["outcome"] == "success",
        }

    def _acquire(self) -> int:
        self._send(type="acquire")
        while True:
            message = self._receive()
            if message["type"] == "lease":
                return int(message["token"])
            if message["type"] == "state":
                self._unread = message

    def _do(self, what: str) -> None:
        self._send(type="do", token=self._token, what=what)

    def _next_state(self) -> State:
        """The newest state; what has queued up before it is skipped.

        Until it comes the last input is repeated: a sign of life that replaces nothing which is yet to be executed.
        """
        while (state := self._receive_state(HEARTBEAT_S)) is None:
            self._send(type="input", token=self._token, **self._input)
        self.state = state
        while (newer := self._receive_state(0.0)) is not None:
            self.state = newer
        return self.state

    def _receive_state(self, timeout_s: float) -> State | None:
        if (unread := self._unread) is not None:
            self._unread = None
            return unread
        while True:
            try:
                message = self._receive(timeout_s)
            except TimeoutError:
                return None
            if message["type"] == "state":
                return message

    def _receive(self, timeout_s: float | None = None) -> dict[str, Any]:
        message: dict[str, Any] = json.loads(self._socket.recv(timeout=timeout_s))
        if message["type"] == "refused" and message["reason"] != ENDED:  # it may end while a command is on its way
            raise ValueError(f"the server refused: {message['reason']}")
        return message

    def _send(self, **message: Any) -> None:
        self._socket.send(json.dumps(message))
