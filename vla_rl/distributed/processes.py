"""The other learners of a run, processes of this machine: started, told what to do over pipes, watched and ended."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import socket
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist

from sims.errors import RunFailure
from vla_rl.config.cluster import ClusterConfig

JOIN_S, END_S = 5.0, 30.0
T = TypeVar("T")


class LearnerProcesses:
    """Ranks 1 to ``size`` - 1 of a torch.distributed group, whose rank 0 this process becomes.

    ``target``: what such a process does, called with its pipe, rank, size, the file of the group, ``hang_s`` and the
    number of threads; at the top of a module or a partial of such. It sends one message when it is ready.
    """

    def __init__(self, target: Callable[..., None], config: ClusterConfig, device: torch.device) -> None:
        self.size, self._hang_s = config.learners, config.hang_s
        self._ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="vla-rl-learners-")  # readable by this user alone
        # Of one machine: nothing listens on its other interfaces.
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ.setdefault(name, "lo0" if sys.platform == "darwin" else "lo")
        try:
            self._start(target, device, config.start_timeout_s)
        except BaseException:
            self.close()
            raise

    def _start(self, target: Callable[..., None], device: torch.device, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")
        store, threads = Path(self._folder.name) / "store", torch.get_num_threads()
        for rank in range(1, self.size):
            ours, theirs = context.Pipe()
            _limit_sending(ours, self._hang_s)
            arguments: tuple[Any, ...] = (theirs, rank, self.size, store, self._hang_s, threads)
            process = context.Process(target=target, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for rank, (_, pipe) in enumerate(self._ranks, start=1):
            if not pipe.poll(timeout_s):
                raise RunFailure(f"learner {rank} did not start within {timeout_s:g} s (cluster.start_timeout_s)")
            try:
                pipe.recv_bytes()
            except (EOFError, ConnectionResetError):
                self.lost()
        join(device, 0, self.size, store, self._hang_s)

    def tell(self, what: str, message: bytes) -> None:
        """Every other rank. RunFailure for one that is gone, or takes nothing in for ``hang_s``."""
        try:
            for _, pipe in self._ranks:
                pipe.send(what)
                pipe.send_bytes(message)
        except (BrokenPipeError, ConnectionResetError, BlockingIOError):
            self.lost()

    def together(self, what: str, message: bytes, own: Callable[[], T]) -> tuple[T, list[Any]]:
        """``own()`` here while the other ranks do ``what``: its result, and theirs. Raises what any of them raises."""
        self.tell(what, message)
        try:
            result = own()
        finally:
            answers = [self._answer(pipe) for _, pipe in self._ranks]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return result, answers

    def _answer(self, pipe: Connection) -> Any:
        try:
            if not pipe.poll(self._hang_s):
                self.lost()
            return pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionResetError):
            self.lost()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Work together with the other ranks, which stops where one of them is lost."""
        try:
            yield
        except RuntimeError as error:
            if isinstance(error, dist.DistError) or "gloo" in str(error):  # closed, or nothing came in time
                self.lost()
            raise

    def lost(self) -> NoReturn:
        """Raises RunFailure that names a rank which ended, or says that all run but one does not answer."""
        # One whose pipe is closed may take a while to be gone.
        ended = wait([process.sentinel for process, _ in self._ranks], END_S)
        for rank, (process, _) in enumerate(self._ranks, start=1):
            if process.sentinel in ended:
                process.join()
                raise RunFailure(
                    f"learner {rank} (process {process.pid}) ended with exit code {process.exitcode} (-9: killed, out "
                    "of memory?). Go on with --resume, with any number of cluster.learners"
                )
        raise RunFailure(
            f"a learner did not answer within {self._hang_s:g} s (cluster.hang_s): processes "
            f"{', '.join(str(process.pid) for process, _ in self._ranks)}. Go on with --resume"
        )

    def close(self) -> None:
        """Where a rank hangs, it is killed."""
        for _, pipe in self._ranks:
            pipe.close()
        for process, _ in self._ranks:
            process.join(JOIN_S)
            if process.exitcode is None:
                process.kill()
                process.join()
        self._ranks = []
        if dist.is_initialized():
            dist.destroy_process_group()
        self._folder.cleanup()


def _limit_sending(pipe: Connection, limit_s: float) -> None:
    """BlockingIOError where nothing of a message could be written to ``pipe`` for this long: it is larger than the
    buffer, and the other side does not read. A pipe of both directions is a socket."""
    with socket.socket(fileno=os.dup(pipe.fileno())) as same:
        timeval = struct.pack("@ll", int(limit_s), int(limit_s % 1 * 1e6))
        same.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def join(device: torch.device, rank: int, size: int, store: Path, hang_s: float) -> None:
    """Of CPU or GPUs of one machine; the ranks find each other by a file."""
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=hang_s),
    )
