"""The process from which a simulator's workers are forked, after it has imported the simulator.

There is one per pool, in the simulator's interpreter. Workers start without importing anything and, where the simulator
can be constructed before the fork, with its models loaded; they share this memory until they write to it. Messages on a
SOCK_SEQPACKET socket:

    trainer -> server   {"do": "fork", "environment": {...}} with two descriptors: the worker's socket, its stderr
    server -> trainer   {"pid": p}, or {"error": message} where the simulator cannot be imported
    trainer -> server   {"do": "end", "pid": p, "within_s": s, "dump": bool}
    server -> trainer   {"code": exit code, or null if it had to be killed}

A worker's process id is not reused before the trainer has asked for its end. Workers do not outlive the server.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from sims.errors import UserError
from sims.subproc.single_env import SimulatorClass, SingleEnv

IMPORT_LATER = "--import-later"
PR_SET_PDEATHSIG = 1
GRACE_S = 5.0  # time for workers to close their simulators after the trainer has ended


def serve(control_fd: int, simulator: SimulatorClass, config: Any) -> tuple[int, SingleEnv | None]:
    """Preload the simulator, then fork workers until the trainer closes the socket.

    Returns in a worker: its socket, and the environment that ``preload`` has made.
    """
    preloaded, refusal = (None, "") if IMPORT_LATER in sys.argv else _preload(simulator, config)
    control = socket.socket(fileno=control_fd)
    workers: set[int] = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 16, 2)
        if not message:
            _wait(workers, GRACE_S)
            os._exit(0)
        request = json.loads(message)
        if request["do"] == "fork" and refusal:
            for descriptor in descriptors:
                os.close(descriptor)
            control.send(json.dumps({"error": refusal}).encode())
        elif request["do"] == "fork":
            pid = _fork(control, descriptors, request["environment"])
            if pid == 0:
                return descriptors[0], preloaded
            workers.add(pid)
            control.send(json.dumps({"pid": pid}).encode())
        else:
            workers.discard(request["pid"])
            code = _end(request["pid"], within_s=request["within_s"], dump=request["dump"])
            control.send(json.dumps({"code": code}).encode())


def _preload(simulator: SimulatorClass, config: Any) -> tuple[SingleEnv | None, str]:
    """What ``preload`` returns, and why it refuses, or "". Executes this program again if it has started threads."""
    preloaded, refusal = None, ""
    try:
        preloaded = simulator.preload(config)
    except UserError as error:
        refusal = str(error)
    if len(os.listdir("/proc/self/task")) > 1:  # a fork would lose the threads and keep their locks
        os.execv(sys.executable, [*sys.orig_argv, IMPORT_LATER])
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # returns memory that compiling has freed
    gc.freeze()  # otherwise the garbage collector writes to every object, which ends its sharing
    return preloaded, refusal


def _fork(control: socket.socket, descriptors: Sequence[int], environment: dict[str, str]) -> int:
    """The worker's process id; 0 in the worker, whose standard output and error go to the second descriptor."""
    server = os.getpid()
    pid = os.fork()
    if pid:
        for descriptor in descriptors:
            os.close(descriptor)
        return pid
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != server:  # the server ended before prctl
        os._exit(1)
    control.close()
    for standard in (1, 2):
        os.dup2(descriptors[1], standard)
    os.close(descriptors[1])
    os.environ.update(environment)
    return 0


def _end(pid: int, *, within_s: float, dump: bool) -> int | None:
    """Wait for a worker's end, then kill it. ``dump``: ask for a stack trace on its standard error before."""
    deadline = time.monotonic() + within_s
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() >= deadline:
            break
        time.sleep(0.005)
    if dump:
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


def _wait(workers: set[int], seconds: float) -> None:
    """Wait until all ``workers`` have ended; the kernel kills the others when this process ends."""
    deadline = time.monotonic() + seconds
    while workers and time.monotonic() < deadline:
        workers.difference_update([pid for pid in workers if os.waitpid(pid, os.WNOHANG)[0]])
        time.sleep(0.005)
