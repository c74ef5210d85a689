"""The trainer's side of the fork server: start it, have it fork workers, and end them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sims.errors import UserError
from sims.subproc.bootstrap import bootstrap, named
from sims.subproc.shared_memory import anonymous_file
from sims.subproc.single_env import SimulatorClass

STDERR_LINES = 20
MAX_STDERR_BYTES = 1 << 20

FORK_WORKERS = """
from sims.subproc.fork_server import serve
from sims.subproc.worker import load, work
simulator, config = load(json.loads(sys.argv[3]))
control_fd, preloaded = serve(int(sys.argv[1]), simulator, config)
work(control_fd, preloaded, simulator, config)
"""


class WorkerLost(Exception):
    """A process has ended or its answer cannot be read."""


class ForkServer:
    """The process from which one simulator's workers are forked (sims/subproc/fork_server.py); they end with it."""

    def __init__(
        self, simulator: SimulatorClass, config: Any, *, interpreter: str, environment: Mapping[str, str]
    ) -> None:
        code, packages = bootstrap(simulator, config, FORK_WORKERS)
        self._start_timeout_s = config.workers.start_timeout_s
        self._silent_s = 0.0  # how long it gave no answer before it was killed for that
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
                start_new_session=True,  # Ctrl-C in the terminal must reach the trainer only
            )
        self.pid = self._process.pid

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def fork(self, control: socket.socket, stderr: int, environment: Mapping[str, str]) -> int:
        """The process id of a new worker.

        Raises UserError where the simulator cannot be imported, WorkerLost where the server has ended.
        """
        answer = self._ask(
            {"do": "fork", "environment": dict(environment)},
            descriptors=[control.fileno(), stderr],
            timeout_s=self._start_timeout_s,
        )
        if answer is None:
            raise WorkerLost(f"cannot be forked: {self._lost()}. End of its standard error:\n{tail(self._stderr)}")
        if "error" in answer:
            raise UserError(answer["error"])
        return int(answer["pid"])

    def end(self, pid: int, *, within_s: float, dump: bool) -> str:
        """Wait until worker ``pid`` has ended, kill it after ``within_s``, and say how it ended."""
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
        if self._stderr >= 0:  # closing again would close another's file, which has its number now
            os.close(self._stderr)
            self._stderr = -1

    def _ask(
        self, request: Mapping[str, Any], *, timeout_s: float, descriptors: Sequence[int] = ()
    ) -> dict[str, Any] | None:
        """The answer; None if the server has ended, or gave no answer for ``timeout_s`` and was killed."""
        if self.ended:
            return None
        timeout_s *= crowding()
        self._control.settimeout(timeout_s)
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            line = self._control.recv(1 << 16)
        except TimeoutError:
            self._silent_s, line = timeout_s, b""
            self._process.send_signal(signal.SIGUSR1)  # it writes a stack trace to its standard error
            time.sleep(0.1)
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            self._process.kill()
            self._process.wait()
            return None
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _lost(self) -> str:
        ended = how_it_ended(self._process.wait())
        if self._silent_s:
            ended = f"did not answer for {self._silent_s:g} s and was killed"
        return f"the process that workers are forked from {ended}"


def crowding() -> float:
    """How many processes wait for each core, at least 1: a worker on a loaded machine takes that much longer."""
    return max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def has_ended(pid: int) -> bool:
    """Whether a process has ended, including a zombie whose exit code has not been read."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"  # proc(5): zombie, dead


def how_it_ended(code: int) -> str:
    """Description of an exit code of subprocess."""
    if code >= 0:
        return f"ended with exit code {code}"
    hint = " (out of memory?)" if code == -signal.SIGKILL else ""
    return f"was killed by {signal.Signals(-code).name}{hint}"


def tail(stderr: int) -> str:
    """The last lines of the anonymous file ``stderr``."""
    size = os.fstat(stderr).st_size
    data = os.pread(stderr, MAX_STDERR_BYTES, max(0, size - MAX_STDERR_BYTES))
    return "\n".join(data.decode(errors="replace").splitlines()[-STDERR_LINES:])
