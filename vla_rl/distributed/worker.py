"""A process that collects the rollouts of some shards, with the very Collector of a run in one process."""

from __future__ import annotations

import copy
import faulthandler
import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from policies.bundle import load_bundle
from policies.device import select_device
from policies.policy import Policy, RobotSpec
from sims.numbers.finite import NotFinite
from sims.vector_env import StartState, VectorEnv
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.config.environments import make_shard_env
from vla_rl.config.experiment import Experiment
from vla_rl.distributed.arrays import PackedChunk, PackedRecord, PackedTensors, to_tensor
from vla_rl.rewards.registry import with_reward
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.failures import FreshFailures
from vla_rl.rollouts.shard import Shard
from vla_rl.rollouts.sharded import ShardedCollector, shared_starts
from vla_rl.rollouts.timer import Span, Timer
from vla_rl.rollouts.weights import load_weights


@dataclass(frozen=True, kw_only=True)
class WorkerSettings:
    """``bundle``: of the policy that the run started from; ``folder``: of the run. Both on storage that all machines
    share. ``hang_s``: after which a rollout leaves the stacks of its threads in the folder. ``kept``: records that
    the learner keeps together."""

    experiment: Experiment
    bundle: Path
    folder: Path
    device: str
    threads: int
    hang_s: float
    kept: int = 0


@dataclass(frozen=True, kw_only=True)
class Request:
    """Rollout ``number`` of a shard, by weights ``version``: ``chunks`` of each environment, or episodes of ``starts``,
    or else one chunk, with ``offset`` [N, H, A] added to its actions.

    ``state``: of the shard's collector before it, for a process that does not have it.
    """

    shard: int
    number: int
    version: int
    chunks: int | None = None
    starts: Sequence[StartState] | None = None
    offset: np.ndarray | None = None
    state: Mapping[str, Any] | None = None
    record: bool = False


@dataclass(frozen=True, kw_only=True)
class Answer:
    """``rollout``: a PackedChunk where one chunk was asked for. ``state``: of the collector after it. ``not_finite``:
    what NotFinite was made of, instead of a rollout. ``times`` and ``spans``: of the process since its last answer."""

    shard: int
    number: int
    rollout: PackedRecord[Experience] | PackedChunk | None
    state: Mapping[str, Any]
    times: Mapping[str, float]
    spans: Sequence[Span]
    failures: Sequence[Any] = ()
    not_finite: Mapping[str, Any] | None = None


def stacks_file(shards: Sequence[int], pid: int) -> str:
    """In the run's folder: what each thread of the collector of these shards did when it hung. Processes of several
    machines write there, and may have the same id."""
    return f"watchdog_collector_{shards[0]}_{pid}.txt"


class ShardWorker:
    """Makes the run's algorithm as the learner does, and keeps only the part that acts."""

    def __init__(self, settings: WorkerSettings, shards: Sequence[int]) -> None:
        torch.set_num_threads(settings.threads)
        self.settings, self._stacks_file = settings, settings.folder / stacks_file(shards, os.getpid())
        experiment = settings.experiment
        count = experiment.algorithm.rollout_shards
        device = select_device(settings.device, precision=experiment.precision, compile=experiment.compile)
        envs = [with_reward(experiment.reward, make_shard_env(experiment.sim, count), device) for _ in shards]
        self.policy = load_bundle(settings.bundle, robot=RobotSpec.of(envs[0].spec), device=device)

        def make(env: VectorEnv, policy: Policy, **arguments: Any) -> ShardedCollector:
            arguments |= {"kept": settings.kept}
            collectors = [
                Collector(env, policy, shard=Shard(i, count), **arguments) for i, env in zip(shards, envs, strict=True)
            ]
            chosen = {name: arguments[name] for name in ("seed", "failure_weight")}
            return ShardedCollector(collectors, shared_starts(env, **chosen))

        algorithm = build_algorithm(
            experiment.algorithm.acting(), self.policy, envs[0], seed=experiment.seed, make_rollouts=make
        )
        sharded = algorithm.collector
        assert isinstance(sharded, ShardedCollector)
        self.collectors = dict(zip(shards, sharded.collectors, strict=True))
        self.timer: Timer = sharded.timer
        self.version: int | None = None
        self._failures = {
            shard: FreshFailures(collector.env, first_env=shard * collector.num_envs)
            for shard, collector in self.collectors.items()
        }

    def describe(self) -> dict[str, Any]:
        """Where it is, and the states that its collectors were made with."""
        states = {shard: collector.state_dict() for shard, collector in self.collectors.items()}
        return {"pid": os.getpid(), "host": socket.gethostname(), "states": states}

    def rollout(self, request: Request, weights: PackedTensors) -> Answer:
        """``weights``: those of ``request.version``."""
        collector = self.collectors[request.shard]
        with reporting_hangs(self._stacks_file, self.settings.hang_s):
            if request.record != self.timer.recording:
                self.timer.record(request.record)
            if request.version != self.version:
                with self.timer.section("sync"):
                    load_weights(collector.policy, collector.critic, weights)
                self.version = request.version
            if request.state is not None:
                collector.load_state_dict(copy.deepcopy(dict(request.state)))  # arrays from Ray are read-only
            collector.policy_version = request.version
            return self._answer(collector, request)

    def _answer(self, collector: Collector, request: Request) -> Answer:
        rollout, problem = None, None
        try:
            rollout = _collect(collector, request)
        except NotFinite as error:
            problem = {name: getattr(error, name) for name in ("quantity", "value", "where", "batch")}
        return Answer(
            shard=request.shard,
            number=request.number,
            rollout=rollout,
            state=collector.state_dict(),
            times=self.timer.take(),
            spans=self.timer.take_spans().get("", ()),
            failures=self._failures[request.shard].take(),
            not_finite=problem,
        )


@contextmanager
def reporting_hangs(path: Path, hang_s: float) -> Iterator[None]:
    """A thread of the interpreter's own writes all stacks to ``path``, whatever this process is stuck in."""
    with path.open("w") as file:
        faulthandler.dump_traceback_later(0.8 * hang_s, file=file)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
        empty = not os.fstat(file.fileno()).st_size
    if empty:
        path.unlink(missing_ok=True)


def _collect(collector: Collector, request: Request) -> PackedRecord[Experience] | PackedChunk:
    if request.chunks is not None:
        return PackedRecord.of(collector.collect(request.chunks))
    if request.starts is not None:
        return PackedRecord.of(collector.episodes(request.starts))
    offset = None if request.offset is None else to_tensor(request.offset, torch.float32).to(collector.device)
    return PackedChunk.of(collector.act_chunk(offset))
