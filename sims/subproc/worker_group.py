"""One worker process per environment: requests to all of them, time-outs, and replacement after failures."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sims.errors import UserError
from sims.subproc.fork_server_process import crowding
from sims.subproc.shared_memory import SharedMemory
from sims.subproc.single_env import SimulatorClass
from sims.subproc.worker_config import WorkerPoolConfig, environment_variables, interpreter_of
from sims.subproc.worker_process import ForkServer, WorkerLost, WorkerProcess, request

log = logging.getLogger(__name__)


class SimulatorFailure(UserError):
    """A simulator cannot be started or fails repeatedly; the message has the end of the worker's standard error."""


@dataclass(frozen=True, kw_only=True)
class WorkerFailure:
    """The worker of environment ``env_id`` failed at ``request`` and was replaced."""

    env_id: int
    pid: int
    request: str
    cause: str
    stderr: str


class WorkerGroup:
    """The worker processes of a SubprocVectorEnv. All of them must report the same SingleSpec."""

    def __init__(self, config: WorkerPoolConfig, simulator: SimulatorClass) -> None:
        self.config, self.simulator = config, simulator
        self.interpreter = interpreter_of(config.workers, config.name)
        self.failures: list[WorkerFailure] = []
        self.memory: SharedMemory | None = None  # created when the first worker has reported its shapes
        self._consecutive_failures = [0] * config.num_envs
        self._ready = [False] * config.num_envs
        self._request = 0
        self._started = False
        self.workers: list[WorkerProcess] = []
        self.server = self._start_server()
        try:
            for env_id in range(config.num_envs):
                self.workers.append(self._launch(env_id))
            self.make_ready(range(config.num_envs))
        except BaseException:
            self.close()
            raise
        self._started = True

    def ask(self, env_ids: Sequence[int], do: str, *, timeout_s: float, **arguments: Any) -> Sequence[int]:
        """Send one request to all ``env_ids`` and wait. Returns those that answered; the others were replaced.

        A worker fails when it neither answers nor completes a control step for ``timeout_s``. Raises SimulatorFailure
        after too many consecutive failures of one environment.
        """
        self._request += 1
        line = b"%d %s" % (self._request, request(do, **arguments))
        if not all(self._ready):
            # The others are still starting after a failure.
            env_ids = [env_id for env_id in env_ids if self._ready[env_id]]
        for env_id in env_ids:
            self.workers[env_id].send(line)
        failed = self._gather(env_ids, do, timeout_s)
        answered = [env_id for env_id in env_ids if env_id not in failed] if failed else env_ids
        for env_id in answered:
            if do == "advance":
                self._consecutive_failures[env_id] = 0
            elif do == "reset":
                self.workers[env_id].trim_stderr()
        return answered

    def make_ready(self, env_ids: Collection[int]) -> None:
        """Wait until replaced workers among ``env_ids`` can take requests."""
        while starting := [env_id for env_id in env_ids if not self._ready[env_id]]:
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
        environment = environment_variables(self.config.workers, 0)
        return ForkServer(self.simulator, self.config, interpreter=self.interpreter, environment=environment)

    def _launch(self, env_id: int) -> WorkerProcess:
        if self.server.ended:
            self.server.close()
            self.server = self._start_server()
        self._ready[env_id] = False
        try:
            return WorkerProcess(self.server, environment_variables(self.config.workers, env_id))
        except WorkerLost as lost:
            raise SimulatorFailure(f"{self.config.name}: worker {env_id} {lost}") from lost

    def _attach(self, env_id: int, introduction: dict[str, Any]) -> None:
        worker, num_envs = self.workers[env_id], self.config.num_envs
        spec = worker.introduce(introduction)
        if self.memory is None:
            self.memory = SharedMemory.create(spec, num_envs)
        if spec != self.memory.spec:
            raise SimulatorFailure(f"{self.config.name}: worker {env_id} reports {spec}, another {self.memory.spec}")
        worker.attach(self.memory, num_envs=num_envs, env_id=env_id)
        self._ready[env_id] = True

    # -- waiting and failing --------------------------------------------------------------------------------------

    def _gather(self, env_ids: Sequence[int], requested: str, timeout_s: float) -> set[int]:
        """Wait until each of ``env_ids`` has answered or failed; returns those that failed, which were replaced."""
        failed: set[int] = set()
        done = b"%d" % self._request
        # Wait for the last one first: the others have mostly finished when it answers, so that this process wakes up
        # once instead of once per environment, which would take a core from a worker each time.
        pending = list(env_ids)
        timeout_s *= crowding()
        poll_s = min(1.0, timeout_s / 4)
        # env_id -> its progress, and the seconds waited without any since. Waiting times are summed instead of read
        # from a clock, so that pausing the whole run (SIGSTOP, a scheduler) does not count.
        silent: dict[int, tuple[int, float]] = {}
        while pending:
            env_id = pending[-1]
            try:
                line = self.workers[env_id].receive(poll_s)
            except WorkerLost as lost:
                self._replace(env_id, requested, str(lost))
                failed.add(pending.pop())
                continue
            if line is None:
                for hung in self._hung(pending, silent, poll_s, timeout_s):
                    pending.remove(hung)
                    failed.add(hung)
                    state = self.workers[hung].process_state()
                    cause = f"neither answered nor completed a step for {timeout_s:g} s ({state})"
                    self._replace(hung, requested, cause, hung=True)
                continue
            if line != done and not self._introduced(env_id, line):
                continue  # the answer to a request that was interrupted
            pending.pop()
        return failed

    def _introduced(self, env_id: int, line: bytes) -> bool:
        """Whether this is a new worker's first answer. Raises UserError if the worker reports one."""
        if not line.startswith(b"{"):
            return False
        answer = json.loads(line)
        if "error" in answer:
            raise UserError(answer["error"])
        self._attach(env_id, answer)
        return True

    def _hung(
        self, env_ids: Collection[int], silent: dict[int, tuple[int, float]], waited_s: float, timeout_s: float
    ) -> list[int]:
        """Those without an answer or progress for ``timeout_s``, after waiting another ``waited_s``."""
        env_ids = [env_id for env_id in env_ids if not self.workers[env_id].has_answered]
        for env_id in env_ids:
            progress, silence_s = silent.get(env_id, (-1, 0.0))
            now = self._progress(env_id)
            silent[env_id] = (now, silence_s + waited_s if progress == now else 0.0)
        return [env_id for env_id in env_ids if silent[env_id][1] > timeout_s]

    def _progress(self, env_id: int) -> int:
        return 0 if self.memory is None else int(self.memory.elapsed[env_id])

    def _replace(self, env_id: int, requested: str, cause: str, *, hung: bool = False) -> None:
        worker = self.workers[env_id]
        stderr = worker.kill(dump=hung)
        failure = WorkerFailure(env_id=env_id, pid=worker.pid, request=requested, cause=cause, stderr=stderr)
        self.failures.append(failure)
        self._consecutive_failures[env_id] += 1
        self.workers[env_id] = self._launch(env_id)
        failed = f"{self.config.name}: worker {env_id} (process {worker.pid}) {cause} at '{requested}'"
        log_tail = f"End of its standard error:\n{stderr}" if stderr else "It wrote nothing to its standard error."
        if not self._started or self._consecutive_failures[env_id] > self.config.workers.max_failures_in_a_row:
            raise SimulatorFailure(f"{failed}, failure {self._consecutive_failures[env_id]} in a row. {log_tail}")
        log.warning("%s; it was replaced and its chunk is invalid. %s", failed, log_tail)
