"""The trainer's side of one worker process: start it, exchange messages, end it, and say why it failed."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import select
import socket
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sims.subproc.fork_server_process import MAX_STDERR_BYTES, ForkServer, WorkerLost, tail
from sims.subproc.shared_memory import SharedMemory, anonymous_file
from sims.subproc.single_env import SingleSpec, restore


class WorkerProcess:
    """One process and the socket that controls it."""

    def __init__(self, server: ForkServer, environment: Mapping[str, str]) -> None:
        self.demonstrates = False
        self._ending = ""
        self._server = server
        self._stderr = anonymous_file("stderr")
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, os.O_APPEND)
        self.control, theirs = socket.socketpair()
        with theirs:
            try:
                self.pid = server.fork(theirs, self._stderr, environment)
            except BaseException:
                self.control.close()
                os.close(self._stderr)
                raise
        self._received = b""
        self._timeout_s = 0.0

    def send(self, line: bytes) -> None:
        try:
            self.control.sendall(line)
        except (BrokenPipeError, ConnectionResetError):
            return  # ``receive`` reports that the process has ended

    @property
    def has_answered(self) -> bool:
        """Whether ``receive`` would return at once."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        return b"\n" in self._received or bool(poll.poll(0))

    def receive(self, timeout_s: float) -> bytes | None:
        """The next answer's line; None if there is none in ``timeout_s`` > 0. Raises WorkerLost if it ended."""
        if timeout_s != self._timeout_s:  # the socket's own time-out needs one system call per answer, poll two
            whole, part = divmod(round(timeout_s * 1e6), 1_000_000)
            self.control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, part))
            self._timeout_s = timeout_s
        while b"\n" not in self._received:
            try:
                data = self.control.recv(1 << 16)
            except BlockingIOError:
                return None
            except ConnectionResetError:
                data = b""
            if not data:
                raise WorkerLost(self._end(within_s=10.0))
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def introduce(self, introduction: dict[str, Any]) -> SingleSpec:
        """Read the worker's first message, which describes its simulator."""
        self.demonstrates = introduction["demonstrates"]
        spec: SingleSpec = restore(SingleSpec, introduction["spec"])
        return spec

    def attach(self, memory: SharedMemory, *, num_envs: int, env_id: int) -> None:
        message = json.dumps({"num_envs": num_envs, "env_id": env_id}).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.control, [message], [memory.fd])

    def hang_up(self) -> None:
        """Tell it to close its simulator and end."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def kill(self, *, dump: bool = False) -> str:
        """Kill the process, so that it can no longer write to the shared memory; returns the end of its stderr.

        ``dump``: ask for a stack trace on its standard error before.
        """
        self._end(within_s=0.0, dump=dump)
        self.control.close()
        text = tail(self._stderr)
        os.close(self._stderr)
        return text

    def stop(self, deadline: float) -> None:
        """Wait for its end until ``deadline`` (time.monotonic), then kill it."""
        if self.control.fileno() >= 0:  # otherwise it was killed before
            self._end(within_s=max(0.0, deadline - time.monotonic()))
            self.kill()

    def process_state(self) -> str:
        """The process state as Linux reports it."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return "state unknown"
        return next(line.split(None, 1)[1] for line in status.splitlines() if line.startswith("State:"))

    def trim_stderr(self) -> None:
        """Discard standard error above 1 MiB, because it is kept in memory."""
        if os.fstat(self._stderr).st_size > MAX_STDERR_BYTES:
            os.ftruncate(self._stderr, 0)

    def _end(self, *, within_s: float, dump: bool = False) -> str:
        """How the process ended; it is killed after ``within_s``."""
        if not self._ending:  # the process id may have been reused since
            self._ending = self._server.end(self.pid, within_s=within_s, dump=dump)
        return self._ending


@functools.lru_cache(maxsize=64)
def request(do: str, **arguments: Any) -> bytes:
    """A request's line without its number; cached, because the same few are sent at every step."""
    return json.dumps({"do": do, **arguments}).encode() + b"\n"
