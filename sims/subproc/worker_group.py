"""One worker process per row: asked together, watched, and replaced when they fail."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from sims.errors import UserError
from sims.subproc.latency import Latency
from sims.subproc.shared_memory import SharedMemory
from sims.subproc.single_env import SingleEnv
from sims.subproc.worker_config import WorkerConfig, environment_of, interpreter_of
from sims.subproc.worker_process import ForkServer, WorkerLost, WorkerProcess, request

log = logging.getLogger(__name__)


class PoolConfig(Protocol):
    """What every adapter's configuration has."""

    @property
    def name(self) -> str: ...
    @property
    def num_envs(self) -> int: ...
    @property
    def latency(self) -> Latency: ...
    @property
    def workers(self) -> WorkerConfig: ...


class SimulatorFailure(UserError):
    """A simulator cannot be started or keeps failing; the message holds the worker's last lines of stderr."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """The worker of ``row`` failed at ``request`` and was replaced."""

    row: int
    pid: int
    request: str
    cause: str
    stderr: str


class WorkerGroup:
    """The processes behind a pool. Every constructor argument must lead to the same spec in every worker."""

    def __init__(self, config: PoolConfig, simulator: type[SingleEnv]) -> None:
        self.config, self.simulator = config, simulator
        self.interpreter = interpreter_of(config.workers, config.name)
        self.failures: list[WorkerFailure] = []
        self.memory: SharedMemory | None = None  # made when the first worker has told its shapes
        self._streak = [0] * config.num_envs
        self._ready = [False] * config.num_envs
        self._request = 0
        self._started = False
        self.workers: list[WorkerProcess] = []
        self.server = self._start_server()
        try:
            for row in range(config.num_envs):
                self.workers.append(self._launch(row))
            self.make_ready(range(config.num_envs))
        except BaseException:
            self.close()
            raise
        self._started = True

    def ask(self, rows: Sequence[int], do: str, *, timeout_s: float, **arguments: Any) -> Sequence[int]:
        """Ask all ``rows`` the same and wait. Returns the rows that answered; the others were replaced.

        A row fails when ``timeout_s`` pass in which it neither answers nor completes a control step. Raises
        SimulatorFailure when a row failed too often in a row.
        """
        self._request += 1
        line = b"%d %s" % (self._request, request(do, **arguments))
        if not all(self._ready):
            rows = [row for row in rows if self._ready[row]]  # the others are still starting after a failure
        for row in rows:
            self.workers[row].send(line)
        failed = self._gather(rows, do, timeout_s)
        answered = [row for row in rows if row not in failed] if failed else rows
        for row in answered:
            if do == "advance":
                self._streak[row] = 0
            elif do == "reset":
                self.workers[row].trim_stderr()
        return answered

    def make_ready(self, rows: Collection[int]) -> None:
        """Wait until replaced workers among ``rows`` can take requests."""
        while starting := [row for row in rows if not self._ready[row]]:
            self._gather(starting, "start", self.config.workers.start_timeout_s)

    def close(self) -> None:
        for worker in self.workers:
            worker.hang_up()
        deadline = time.monotonic() + 5.0
        for worker in self.workers:
            worker.stop(deadline)
        self.workers = []
        self.server.close()
        if self.memory is not None:
            self.memory.close()

    # -- starting -------------------------------------------------------------------------------------------------

    def _start_server(self) -> ForkServer:
        environment = environment_of(self.config.workers, 0)
        return ForkServer(self.simulator, self.config, interpreter=self.interpreter, environment=environment)

    def _launch(self, row: int) -> WorkerProcess:
        if self.server.ended:
            self.server.close()
            self.server = self._start_server()
        self._ready[row] = False
        try:
            return WorkerProcess(self.server, environment_of(self.config.workers, row))
        except WorkerLost as lost:
            raise SimulatorFailure(f"{self.config.name}: worker {row} {lost}") from lost

    def _attach(self, row: int, introduction: dict[str, Any]) -> None:
        worker, rows = self.workers[row], self.config.num_envs
        spec = worker.introduce(introduction)
        if self.memory is None:
            self.memory = SharedMemory.create(spec, rows)
        if spec != self.memory.spec:
            raise SimulatorFailure(f"{self.config.name}: worker {row} says {spec}, another said {self.memory.spec}")
        worker.attach(self.memory, rows=rows, row=row)
        self._ready[row] = True

    # -- waiting and failing --------------------------------------------------------------------------------------

    def _gather(self, rows: Sequence[int], asked: str, timeout_s: float) -> set[int]:
        """Wait until each of ``rows`` has answered or failed; returns those that failed, which were replaced."""
        failed: set[int] = set()
        done = b"%d" % self._request
        # The last first: it was asked last, so the others are mostly done when it answers, and this process wakes once
        # instead of once per row, each time taking a core from a worker.
        pending = list(rows)
        patience_s = min(1.0, timeout_s / 4)
        # Row -> its progress, and how long it has been waited for since. Waits are counted and not clocks read, since
        # a run that was stopped as a whole (by a scheduler, by hand) finds its workers as slow as itself.
        silent: dict[int, tuple[int, float]] = {}
        while pending:
            row = pending[-1]
            try:
                line = self.workers[row].receive(patience_s)
            except WorkerLost as lost:
                self._replace(row, asked, str(lost))
                failed.add(pending.pop())
                continue
            if line is None:
                for hung in self._hung(pending, silent, patience_s, timeout_s):
                    pending.remove(hung)
                    failed.add(hung)
                    state = self.workers[hung].process_state()
                    self._replace(hung, asked, f"gave no sign of life for {timeout_s:g} s ({state})", hung=True)
                continue
            if line != done and not self._introduced(row, line):
                continue  # to a request that was interrupted
            pending.pop()
        return failed

    def _introduced(self, row: int, line: bytes) -> bool:
        """Whether this is a new worker's first answer. Raises UserError with the text of one that gives up."""
        if not line.startswith(b"{"):
            return False
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(answer["error"])
        self._attach(row, answer)
        return True

    def _hung(
        self, rows: Collection[int], silent: dict[int, tuple[int, float]], waited_s: float, timeout_s: float
    ) -> list[int]:
        """Rows without an answer or progress for ``timeout_s``, now that another ``waited_s`` have passed."""
        rows = [row for row in rows if not self.workers[row].has_answered]
        for row in rows:
            progress, silence_s = silent.get(row, (-1, 0.0))
            now = self._progress(row)
            silent[row] = (now, silence_s + waited_s if progress == now else 0.0)
        return [row for row in rows if silent[row][1] > timeout_s]

    def _progress(self, row: int) -> int:
        return 0 if self.memory is None else int(self.memory.elapsed[row])

    def _replace(self, row: int, asked: str, cause: str, *, hung: bool = False) -> None:
        worker = self.workers[row]
        stderr = worker.kill(dump=hung)
        failure = WorkerFailure(row=row, pid=worker.pid, request=asked, cause=cause, stderr=stderr)
        self.failures.append(failure)
        self._streak[row] += 1
        self.workers[row] = self._launch(row)
        described = f"{self.config.name}: worker {row} (process {worker.pid}) {cause} at '{asked}'"
        said = f"Its last words:\n{stderr}" if stderr else "It wrote nothing to its standard error."
        if not self._started or self._streak[row] > self.config.workers.max_failures_in_a_row:
            raise SimulatorFailure(f"{described}, failure {self._streak[row]} in a row. {said}")
        log.warning("%s; it was replaced and its chunk is left out. %s", described, said)
