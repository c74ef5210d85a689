"""The trainer's side of one worker process: start it, talk to it, end it, and say why it failed."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import importlib.util
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sims.errors import UserError
from sims.install import interpreter
from sims.shared_rows import SharedRows, anonymous_file
from sims.single_env import SingleEnv, SingleSpec, restore

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
WORK = """
from sims.worker import main
main(int(sys.argv[1]))
"""


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """How worker processes run.

    ``python``: their interpreter. ``environment``: the name of one that ``vla-rl sims install`` made, by default the
    simulator's own name. Without either it is the trainer's. ``gl``: how MuJoCo-based simulators render. ``devices``:
    GPUs for rendering, dealt out row by row; none leaves the choice to the driver. A worker that takes longer than its
    time-out for starting, one reset or one control step counts as failed; ``max_failures_in_a_row`` failures of a row
    without a chunk between them are endured, one more stops the run.
    """

    python: str | None = None
    environment: str | None = None
    gl: Literal["egl", "osmesa", "glfw"] = "egl"
    devices: tuple[int, ...] = ()
    start_timeout_s: float = 600.0
    reset_timeout_s: float = 120.0
    step_timeout_s: float = 30.0
    max_failures_in_a_row: int = 3


class WorkerLost(Exception):
    """The process ended, or its answer makes no sense."""


class WorkerProcess:
    """One process and the socket that controls it."""

    def __init__(
        self, simulator: type[SingleEnv], config: Any, *, interpreter: str, environment: Mapping[str, str]
    ) -> None:
        self.demonstrates = False
        self._stderr = anonymous_file("stderr")
        fcntl.fcntl(self._stderr, fcntl.F_SETFL, os.O_APPEND)
        mine, theirs = socket.socketpair()
        code, packages = bootstrap(simulator, WORK)
        with theirs:
            self._process = subprocess.Popen(
                [interpreter, "-c", code, str(theirs.fileno()), packages],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=self._stderr,
                stderr=self._stderr,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C in the terminal is for the trainer alone
            )
        self.control = mine
        self.pid = self._process.pid
        self._received = b""
        self._patience_s = 0.0
        start = {"module": simulator.__module__, "simulator": simulator.__qualname__}
        self.send(encode({**start, "config": dataclasses.asdict(config)}))

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
                raise WorkerLost(self._how_it_ended())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line

    def introduce(self, introduction: dict[str, Any]) -> SingleSpec:
        """What the worker said when it had made its simulator."""
        self.demonstrates = introduction["demonstrates"]
        spec: SingleSpec = restore(SingleSpec, introduction["spec"])
        return spec

    def attach(self, memory: SharedRows, *, rows: int, row: int) -> None:
        message = json.dumps({"rows": rows, "row": row}).encode()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(self.control, [message], [memory.fd])

    def kill(self, *, dump: bool = False) -> str:
        """End the process for certain, so that no other can write to its row, and return its last lines of stderr.

        ``dump``: let it say first where it hangs.
        """
        if dump and self._process.poll() is None:
            self._process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)
        self._process.kill()
        self._process.wait()
        self.control.close()
        text = self.stderr_tail()
        os.close(self._stderr)
        return text

    def hang_up(self) -> None:
        """Ask it to close its simulator and end."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_WR)

    def stop(self, deadline: float) -> None:
        """Wait for its end until ``deadline`` (time.monotonic), then enforce it."""
        if self.control.fileno() >= 0:  # else it was killed before
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
            self.kill()

    def process_state(self) -> str:
        """Linux's word for what it is doing."""
        try:
            status = Path(f"/proc/{self.pid}/status").read_text()
        except OSError:
            return "state unknown"
        return next(line.split(None, 1)[1] for line in status.splitlines() if line.startswith("State:"))

    def stderr_tail(self) -> str:
        size = os.fstat(self._stderr).st_size
        data = os.pread(self._stderr, MAX_STDERR_BYTES, max(0, size - MAX_STDERR_BYTES))
        return "\n".join(data.decode(errors="replace").splitlines()[-STDERR_LINES:])

    def trim_stderr(self) -> None:
        """Keep a talkative simulator from filling the memory."""
        if os.fstat(self._stderr).st_size > MAX_STDERR_BYTES:
            os.ftruncate(self._stderr, 0)

    def _how_it_ended(self) -> str:
        try:
            code = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            return "closed its socket"
        if code >= 0:
            return f"ended with exit code {code}"
        hint = " (out of memory?)" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"


def bootstrap(simulator: type[SingleEnv], program: str) -> tuple[str, str]:
    """The code for ``python -c`` that runs ``program`` with our packages, and its second argument."""
    packages = {name: _folder(name) for name in ("sims", simulator.__module__.split(".")[0])}
    return BOOTSTRAP + program, json.dumps(packages)


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"


def _folder(package: str) -> str:
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise UserError(
            f"a simulator's class must live in a package that can be imported, got module {package!r}. "
            "Put it into a file of a package, not into a script."
        )
    return str(Path(spec.submodule_search_locations[0]).resolve())


def environment_of(config: WorkerConfig, row: int) -> dict[str, str]:
    """One thread per worker, its renderer, and its device."""
    chosen = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MUJOCO_GL": config.gl}
    chosen["PYOPENGL_PLATFORM"] = config.gl
    if config.devices:
        device = str(config.devices[row % len(config.devices)])
        chosen |= {"MUJOCO_EGL_DEVICE_ID": device, "CUDA_VISIBLE_DEVICES": device}
    return chosen


def interpreter_of(config: WorkerConfig, name: str) -> str:
    """Which Python runs the workers of simulator ``name``; UserError if the one asked for does not exist."""
    installed = interpreter(config.environment or name)
    if config.environment and not installed:
        raise UserError(
            f"sim.workers.environment: {config.environment!r} is not installed. Run: vla-rl sims install "
            f"{config.environment}"
        )
    path = config.python or installed or sys.executable
    if not Path(path).exists():
        raise UserError(f"sim.workers.python: there is no interpreter at {path}. Leave it out to use the default.")
    return path
