"""Collector processes and their supervision: one that dies or hangs is replaced and its rollouts are collected again.

A rollout is determined by the state of its shard's collector before it and by the weights, and both are with the
learner, so what the replacement returns is what was lost. Ray itself restarts nothing: its actors would come back
blank.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from sims.errors import RunFailure, UserError
from vla_rl.config.cluster import ClusterConfig
from vla_rl.distributed.worker import Answer, Request, ShardWorker, WorkerSettings, stacks_file

POLL_S = 0.5
Event = Callable[[Mapping[str, Any]], None]


class _KilledAtStart(UserError):
    """A process that ended while it started, without an exception of its own."""


@dataclass
class _Process:
    """``pending``: its requests in order, with their weights. ``since``: when it last gave a sign of life."""

    number: int
    shards: list[int]
    actor: Any
    pid: int
    pending: dict[Any, tuple[Request, Any]] = field(default_factory=dict)
    has_state: set[int] = field(default_factory=set)
    since: float = 0.0


class CollectorPool:
    """``states``: of each shard's collector, after the last rollout that it has answered."""

    def __init__(self, settings: WorkerSettings, config: ClusterConfig, *, shards: int, log: Event) -> None:
        self.settings, self.config, self.log, self.replaced = settings, config, log, 0
        self.count = min(config.collectors or shards, shards)
        self.states: dict[int, Mapping[str, Any]] = {}
        started = [self._start(number, list(range(number, shards, self.count))) for number in range(self.count)]
        self._processes = [self._ready(*one) for one in started]  # they start side by side
        for process in self._processes:
            process.has_state = set(process.shards)

    def set_state(self, shard: int, state: Mapping[str, Any]) -> None:
        """Go on from ``state``; what was asked of the shard before is forgotten."""
        self.states[shard] = state
        process = self._of(shard)
        process.has_state.discard(shard)
        process.pending = {ref: one for ref, one in process.pending.items() if one[0].shard != shard}

    def submit(self, request: Request, weights: Any) -> None:
        """After everything that was asked of the shard before. ``weights``: a reference to PackedTensors."""
        process = self._of(request.shard)
        if not process.pending:
            process.since = time.monotonic()
        needs = request.shard not in process.has_state
        sent = replace(request, state=self.states[request.shard]) if needs else request
        process.has_state.add(request.shard)
        process.pending[process.actor.rollout.remote(sent, weights)] = (request, weights)

    def next_answer(self) -> Answer:
        """The next that is complete, of any process. Raises RunFailure where too many processes are lost.

        A process's answers are taken in the order of its requests, so that ``states`` never go back: of those that are
        ready Ray may return a later one first.
        """
        while True:
            refs = [next(iter(process.pending)) for process in self._processes if process.pending]
            ready, _ = ray.wait(refs, num_returns=1, timeout=POLL_S)
            if not ready:
                self._replace_silent()
                continue
            process = next(process for process in self._processes if ready[0] in process.pending)
            answer = self._get(process, ready[0])
            if answer is not None:
                return answer

    def close(self) -> None:
        for process in self._processes:
            ray.kill(process.actor)
        self._processes = []

    def _of(self, shard: int) -> _Process:
        return self._processes[shard % self.count]

    def _get(self, process: _Process, ref: Any) -> Answer | None:
        """None where the process is lost; its rollouts are then asked of another."""
        try:
            answer: Answer = ray.get(ref)
        except RayTaskError as error:  # an exception in the collector: it would come again
            if isinstance(error.cause, UserError | RunFailure):
                raise type(error.cause)(str(error.cause)) from None
            raise
        except RayError as error:  # dead, out of memory, its machine gone, its answer lost
            self._replace(process, " ".join(f"{type(error).__name__}: {error}".split())[:300])
            return None
        request, _ = process.pending.pop(ref)
        process.since = time.monotonic()
        answer = replace(answer, state=copy.deepcopy(answer.state))  # arrays from Ray are read-only
        self.states[request.shard] = answer.state
        return answer

    def _replace_silent(self) -> None:
        now, limit_s = time.monotonic(), self.config.hang_s
        for process in self._processes:
            if process.pending and now - process.since > limit_s:
                request = next(iter(process.pending.values()))[0]
                slow = f"rollout {request.number} of shard {request.shard} took over {limit_s:g} s"
                self._replace(process, f"{slow}; {self._stacks(process)}")

    def _stacks(self, process: _Process) -> str:
        stacks = self.settings.folder / stacks_file(process.shards, process.pid)
        if stacks.exists() and stacks.stat().st_size:
            return f"its stacks are in {stacks}"
        return "it left no stacks: it is stopped, or its machine is gone"

    def _replace(self, process: _Process, cause: str) -> None:
        self._count_lost(process.number, process.pid, cause)
        ray.kill(process.actor)
        self._processes[process.number] = self._replacement(process.number, process.shards)
        for request, weights in process.pending.values():
            self.submit(request, weights)

    def _replacement(self, number: int, shards: list[int]) -> _Process:
        """One that is killed while it starts is lost as any other."""
        while True:
            try:
                return self._ready(*self._start(number, shards))
            except _KilledAtStart as error:
                self._count_lost(number, None, str(error))

    def _count_lost(self, number: int, pid: int | None, cause: str) -> None:
        self.log({"event": "lost", "collector": number, "pid": pid, "cause": cause})
        self.replaced += 1
        if self.replaced > self.config.restarts:
            raise RunFailure(
                f"{self.replaced} collectors were lost, more than cluster.restarts ({self.config.restarts}); the last "
                f"one was number {number}: {cause}"
            )

    def _start(self, number: int, shards: list[int]) -> tuple[int, list[int], Any]:
        config = self.config
        remote = ray.remote(ShardWorker).options(
            num_cpus=config.cpus,
            num_gpus=config.gpus,
            max_restarts=0,
            max_task_retries=0,
            scheduling_strategy="SPREAD" if config.placement == "spread" else "DEFAULT",
        )
        return number, shards, remote.remote(self.settings, shards)

    def _ready(self, number: int, shards: list[int], actor: Any) -> _Process:
        try:
            about = ray.get(actor.describe.remote(), timeout=self.config.start_timeout_s)
        except GetTimeoutError:
            ray.kill(actor)
            free = {name: n for name, n in ray.available_resources().items() if name in ("CPU", "GPU")}
            raise UserError(
                f"cluster: collector {number} did not start within {self.config.start_timeout_s:g} s "
                f"(cluster.start_timeout_s). It asks for {self.config.cpus:g} CPUs and {self.config.gpus:g} GPUs, the "
                f"cluster has free: {free}; with fewer cluster.collectors, or cluster.cpus, it may fit"
            ) from None
        except RayActorError as error:
            kind = UserError if error.actor_init_failed else _KilledAtStart  # an exception would come again
            raise kind(f"cluster: collector {number} cannot be made: {' '.join(str(error).split())[-400:]}") from None
        for shard, state in about.pop("states").items():
            self.states.setdefault(shard, copy.deepcopy(state))
        self.log({"event": "started", "collector": number, "shards": shards, **about})
        return _Process(number, shards, actor, about["pid"], since=time.monotonic())
