"""Rollouts of environments that are split into shards, collected in this process, one after another or in threads.

``vla_rl/distributed`` collects the same shards in other processes: the results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor

from policies.policy import Policy
from sims.vector_env import StartState, VectorEnv
from vla_rl.critics.value import ValueCritic
from vla_rl.rollouts.collector import ActedChunk, Collector, Offset, unchanged
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.failures import FreshFailures
from vla_rl.rollouts.shard import Shard
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.rollouts.timer import Timer

if TYPE_CHECKING:
    from sims.subproc.worker_group import WorkerFailure


S = TypeVar("S")
R = TypeVar("R")


@runtime_checkable
class Rollouts(Protocol):
    """Where an algorithm gets experience: a Collector, several of them, or collectors in other processes.

    ``starts``: of the episodes that the algorithm hands out itself (``episodes``).
    """

    num_envs: int
    starts: TrainingStarts
    timer: Timer

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Act with these weights (``named_weights``) from the next rollout on."""
        ...

    def collect(self, num_chunks: int) -> Experience:
        """``num_chunks`` chunks of every environment, [T, N]."""
        ...

    def episodes(self, starts: Sequence[StartState]) -> Experience:
        """One episode per environment, [T, N]; ``valid`` is False after its end."""
        ...

    def act(self, offset: Offset = unchanged) -> ActedChunk:
        """One chunk of every environment.

        ``offset(ahead)``: what is added to the actions of a chunk, [N, H, A]; asked for when the chunk is, which is
        while ``ahead`` of those before it are not taken yet (ahead.py).
        """
        ...

    def suspended(self) -> AbstractContextManager[None]:
        """Lends the environment that the algorithm was made with to somebody else."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None: ...


@runtime_checkable
class PartialRollouts(Rollouts, Protocol):
    """Rollouts that need not wait for their last episodes."""

    def complete_groups(self, take: Callable[[int], Sequence[StartState]], *, size: int, share: float) -> Experience:
        """Groups of ``size`` environments that share a start, once a ``share`` of all are complete; the others go on in
        the next call."""
        ...


@runtime_checkable
class MakeRollouts(Protocol):
    """What an algorithm calls for its Rollouts; Collector is one. ``kept``: records that it keeps together, of all
    shards, rollouts and recorded episodes; 0: those of one rollout."""

    def __call__(
        self,
        env: VectorEnv,
        policy: Policy,
        *,
        critic: ValueCritic | None,
        gamma: float,
        failure_weight: float,
        seed: int,
        kept: int = 0,
    ) -> Rollouts: ...


class ShardedCollector:
    """One Collector per shard, each with an environment of its own."""

    def __init__(self, collectors: Sequence[Collector], starts: TrainingStarts) -> None:
        self.collectors, self.starts, self.timer = collectors, starts, Timer()
        self.num_envs = sum(collector.num_envs for collector in collectors)
        self.failures: list[WorkerFailure] = []
        self._fresh = []
        for number, collector in enumerate(collectors):
            collector.timer = self.timer
            self._fresh.append(FreshFailures(collector.env, first_env=number * collector.num_envs))

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        for collector in self.collectors:
            collector.publish(version, tensors)

    def collect(self, num_chunks: int) -> Experience:
        return self._joined(self._each(Collector.collect, [num_chunks] * len(self.collectors)))

    def episodes(self, starts: Sequence[StartState]) -> Experience:
        rollout = self._joined(self._each(Collector.episodes, split_starts(starts, len(self.collectors))))
        self.starts.learn(rollout)
        return rollout

    def act(self, offset: Offset = unchanged) -> ActedChunk:
        acted = self._each(Collector.act_chunk, split_offset(offset(0), len(self.collectors)))
        self._note_failures()
        return ActedChunk.side_by_side(acted)

    def complete_groups(self, take: Callable[[int], Sequence[StartState]], *, size: int, share: float) -> Experience:
        rollout = self._joined([one.complete_groups(take, size=size, share=share) for one in self.collectors])
        self.starts.learn(rollout)
        return rollout

    def _each(self, function: Callable[[Collector, S], R], parts: Sequence[S]) -> list[R]:
        """``function`` of every collector and its part."""
        return [function(collector, part) for collector, part in zip(self.collectors, parts, strict=True)]

    def _joined(self, parts: Sequence[Experience]) -> Experience:
        self._note_failures()
        return Experience.side_by_side(parts)

    def _note_failures(self) -> None:
        self.failures += [failure for source in self._fresh for failure in source.take()]

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The environments of the shards are nobody else's."""
        yield

    def state_dict(self) -> dict[str, Any]:
        shards = [collector.state_dict() for collector in self.collectors]
        return {"shards": shards, "starts": self.starts.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.starts.load_state_dict(state["starts"])
        for collector, part in zip(self.collectors, state["shards"], strict=True):
            collector.load_state_dict(part)

    def close(self) -> None:
        for collector in self.collectors:
            collector.env.close()


class PipelinedCollector(ShardedCollector):
    """Shards in a thread each: one's environment steps while the policy chooses for another's.

    Both wait outside of Python's lock: simulators in processes of their own or in C, the policy in torch. A shard's
    numbers depend on its own state and the weights alone, so they are those of a ShardedCollector.
    """

    def __init__(self, collectors: Sequence[Collector], starts: TrainingStarts) -> None:
        super().__init__(collectors, starts)
        self._threads = [ThreadPoolExecutor(1, f"shard {number}") for number in range(len(collectors))]
        for collector in collectors:
            collector.timer = Timer()  # one stage at a time

    def _each(self, function: Callable[[Collector, S], R], parts: Sequence[S]) -> list[R]:
        tasks = zip(self._threads, self.collectors, parts, strict=True)
        for collector in self.collectors:
            collector.timer.record(self.timer.recording)
        with self.timer.section("idle"):
            futures = [thread.submit(function, collector, part) for thread, collector, part in tasks]
            wait(futures)
        for number, collector in enumerate(self.collectors):
            self.timer.add_spans(f"shard {number}", collector.timer.take_spans().get("", ()))
            self.timer.add_shares(collector.timer.take(), len(self.collectors))
        return [future.result() for future in futures]

    def close(self) -> None:
        for thread in self._threads:
            thread.shutdown(cancel_futures=True)
        super().close()


def make_sharded(make_env: Callable[[], VectorEnv], count: int, *, pipelined: bool = False) -> MakeRollouts:
    """``make_env``: the environment of one shard."""
    kind = PipelinedCollector if pipelined else ShardedCollector

    def make(env: VectorEnv, policy: Policy, **settings: Any) -> ShardedCollector:
        with ExitStack() as opened:  # closes the environments of the first shards where a later one fails
            envs = [opened.enter_context(closing(make_env())) for _ in range(count)]
            collectors = [Collector(one, policy, shard=Shard(i, count), **settings) for i, one in enumerate(envs)]
            starts = shared_starts(env, seed=settings["seed"], failure_weight=settings["failure_weight"])
            opened.pop_all()
        return kind(collectors, starts)

    return make


def shared_starts(env: VectorEnv, *, seed: int, failure_weight: float) -> TrainingStarts:
    """Of the episodes that are handed to all shards together; as in a Collector, the first went into its making."""
    starts = TrainingStarts(seed=seed, num_tasks=len(env.spec.tasks), failure_weight=failure_weight)
    starts.next_index = env.spec.num_envs
    return starts


def split_starts(starts: Sequence[StartState], count: int) -> list[Sequence[StartState]]:
    """The starts of each of ``count`` shards: neighbors stay together."""
    size = len(starts) // count
    return [starts[i * size : (i + 1) * size] for i in range(count)]


def split_offset(offset: Tensor | None, count: int) -> Sequence[Tensor | None]:
    """The part of each of ``count`` shards of what is added to actions [N, H, A]."""
    return [None] * count if offset is None else offset.chunk(count)
