"""The trainer's side of worker processes: have one forked, talk to it, end it, and say why it failed."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sims.errors import UserError
from sims.subproc.shared_memory import SharedMemory, anonymous_file
from sims.subproc.single_env import SingleEnv, SingleSpec, restore

STDERR_LINES = 20
MAX_STDERR_BYTES = 1 << 20

# The packages named are imported from where the trainer has them, without putting their folder (site-packages, with the
# trainer's own numpy) on the path of an interpreter that has other pins.
BOOTSTRAP = """
import importlib.util, json, sys
for name, folder in json.loads(sys.argv[2]).items():
    spec = importlib.util.spec_from_file_location(name, folder + "/__init__.py", submodule_search_locations=[folder])
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
"""
FORK_WORKERS = """
from sims.subproc.fork_server import serve
from sims.subproc.worker import load, work
simulator, config = load(json.loads(sys.argv[3]))
work(serve(int(sys.argv[1]), simulator, config), simulator, config)
"""


class WorkerLost(Exception):
    """The process ended, or its answer makes no sense."""


class ForkServer:
    """The process that one simulator's workers are forked from (sims/subproc/fork_server.py). Its end is theirs."""

    def __init__(
        self, simulator: type[SingleEnv], config: Any, *, interpreter: str, environment: Mapping[str, str]
    ) -> None:
        code, packages = bootstrap(simulator, FORK_WORKERS)
        self._start_timeout_s = config.workers.start_timeout_s
        self._stderr = anonymous_file("stderr")
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [interpreter, "-c", code, str(theirs.fileno()), packages, json.dumps(named(simulator, config))],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer alone
            )
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, control: socket.socket, stderr: int, environment: Mapping[str, str]) -> int:
        """The process id of a new worker.

        Raises UserError where the simulator cannot be imported, WorkerLost with the server's last words where it ended.
        """
        answer = self._ask(
            {"do": "fork", "environment": dict(environment)},
            descriptors=[control.fileno(), stderr],
            timeout_s=self._start_timeout_s,
        )
        if answer is None:
            raise WorkerLost(f"cannot be forked: {self._lost()}. Its last words:\n{tail(self._stderr)}")
        if "error" in answer:
            raise UserError(answer["error"])
        return int(answer["pid"])

    def end(self, pid: int, *, within_s: float, dump: bool) -> str:
        """Make sure that worker ``pid`` has ended, and say how it did."""
        request = {"do": "end", "pid": pid, "within_s": within_s, "dump": dump}
        answer = self._ask(request, timeout_s=within_s + self._start_timeout_s)
        if answer is None:
            while not has_ended(pid):  # the kernel has killed it with its parent
                time.sleep(0.005)
            return f"was lost: {self._lost()}"
        return "closed its socket" if answer["code"] is None else how_it_ended(answer["code"])

    def close(self) -> None:
        self._control.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10.0)
        self._process.kill()
        self._process.wait()
        os.close(self._stderr)

    def _ask(
        self, request: Mapping[str, Any], *, timeout_s: float, descriptors: Sequence[int] = ()
    ) -> dict[str, Any] | None:
        """The answer; None if the server has ended, or was silent for ``timeout_s`` and was killed."""
        if self.ended:
            return None
        self._control.settimeout(timeout_s)
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            line = self._control.recv(1 << 16)
        except (TimeoutError, BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            self._process.kill()
            self._process.wait()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lost(self) -> str:
        return f"the process that workers are forked from {how_it_ended(self._process.wait())}"


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
        self._patience_s = 0.0

    def send(self, line: bytes) -> None:
        try:
            self.control.sendall(line)
        except (BrokenPipeError, ConnectionResetError):
            return  # that the process is gone is noticed by ``receive``

    @property
    def has_answered(self) -> bool:
        """Whether ``receive`` would return at once."""
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        return b"\n" in self._received or bool(poll.poll(0))

    def receive(self, timeout_s: float) -> bytes | None:
        """The next answer's line, or None if none came in ``timeout_s`` > 0. Raises WorkerLost at the process's end."""
        if timeout_s != self._patience_s:  # the kernel's own time-out: one system call per answer, where poll needs two
            whole, part = divmod(round(timeout_s * 1e6), 1_000_000)
            self.control.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, part))
            self._patience_s = timeout_s
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
        """What the worker said when it had made its simulator."""
        self.demonstrates = introduction["demonstrates"]
        spec: SingleSpec = restore(SingleSpec, introduction["spec"])
        return spec

    def attach(self, memory: SharedMemory, *, rows: int, row: int) -> None:
        message = json.dumps({"rows": rows, "row": row}).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.control, [message], [memory.fd])

    def hang_up(self) -> None:
        """Ask it to close its simulator and end."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def kill(self, *, dump: bool = False) -> str:
        """End the process for certain, so that no other can write to its row, and return its last lines of stderr.

        ``dump``: let it say first where it hangs.
        """
        self._end(within_s=0.0, dump=dump)
        self.control.close()
        text = tail(self._stderr)
        os.close(self._stderr)
        return text

    def stop(self, deadline: float) -> None:
        """Wait for its end until ``deadline`` (time.monotonic), then enforce it."""
        if self.control.fileno() >= 0:  # else it was killed before
            self._end(within_s=max(0.0, deadline - time.monotonic()))
            self.kill()

    def process_state(self) -> str:
        """Linux's word for what it is doing."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return "state unknown"
        return next(line.split(None, 1)[1] for line in status.splitlines() if line.startswith("State:"))

    def trim_stderr(self) -> None:
        """Keep a talkative simulator from filling the memory."""
        if os.fstat(self._stderr).st_size > MAX_STDERR_BYTES:
            os.ftruncate(self._stderr, 0)

    def _end(self, *, within_s: float, dump: bool = False) -> str:
        """How the process ended; it may take ``within_s`` before it is killed."""
        if not self._ending:  # else its id may be another's by now
            self._ending = self._server.end(self.pid, within_s=within_s, dump=dump)
        return self._ending


def has_ended(pid: int) -> bool:
    """Whether a process runs no more, be it that nobody has asked for its exit code yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"  # proc(5): zombie, dead


def how_it_ended(code: int) -> str:
    """An exit code of subprocess in words."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def tail(stderr: int) -> str:
    """The last lines of an anonymous file."""
    size = os.fstat(stderr).st_size
    data = os.pread(stderr, MAX_STDERR_BYTES, max(0, size - MAX_STDERR_BYTES))
    return "\n".join(data.decode(errors="replace").splitlines()[-STDERR_LINES:])


def bootstrap(simulator: type[SingleEnv], program: str) -> tuple[str, str]:
    """The code for ``python -c`` that runs ``program`` with our packages, and its second argument."""
    packages = {name: _folder(name) for name in ("sims", simulator.__module__.split(".")[0])}
    return BOOTSTRAP + program, json.dumps(packages)


def named(simulator: type[SingleEnv], config: Any) -> dict[str, Any]:
    """A simulator and its configuration as ``worker.load`` takes them."""
    return {
        "module": simulator.__module__,
        "simulator": simulator.__qualname__,
        "config": dataclasses.asdict(config),
    }


@functools.lru_cache(maxsize=64)
def request(do: str, **arguments: Any) -> bytes:
    """A request's line without its number; the same few are made at every step."""
    return json.dumps({"do": do, **arguments}).encode() + b"\n"


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"a simulator's class must live in a package that can be imported, got module {package!r}. "
            "Put it into a file of a package, not into a script."
        )
    return str(Path(spec.submodule_search_locations[0]).resolve())
