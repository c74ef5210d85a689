"""Rollouts of environments that are split into shards, collected one after another in this process.

``vla_rl/distributed`` collects the same shards in other processes: the results are the same, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torch import Tensor

from policies.policy import Policy
from sims.vector_env import StartState, VectorEnv
from vla_rl.critics.value import ValueCritic
from vla_rl.rollouts.collector import ActedChunk, Collector
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.failures import FreshFailures
from vla_rl.rollouts.shard import Shard
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.rollouts.timer import Timer

if TYPE_CHECKING:
    from sims.subproc.worker_group import WorkerFailure


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

    def act(self, offset: Tensor | None = None) -> ActedChunk:
        """One chunk of every environment, ``offset`` [N, H, A] added to its actions."""
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
    """What an algorithm calls for its Rollouts; Collector is one."""

    def __call__(
        self,
        env: VectorEnv,
        policy: Policy,
        *,
        critic: ValueCritic | None,
        gamma: float,
        failure_weight: float,
        seed: int,
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
        return self._joined([collector.collect(num_chunks) for collector in self.collectors])

    def episodes(self, starts: Sequence[StartState]) -> Experience:
        parts = zip(self.collectors, split_starts(starts, len(self.collectors)), strict=True)
        rollout = self._joined([collector.episodes(part) for collector, part in parts])
        self.starts.learn(rollout)
        return rollout

    def act(self, offset: Tensor | None = None) -> ActedChunk:
        parts = zip(self.collectors, split_offset(offset, len(self.collectors)), strict=True)
        acted = [collector.act(part) for collector, part in parts]
        self._note_failures()
        return ActedChunk.side_by_side(acted)

    def complete_groups(self, take: Callable[[int], Sequence[StartState]], *, size: int, share: float) -> Experience:
        rollout = self._joined([one.complete_groups(take, size=size, share=share) for one in self.collectors])
        self.starts.learn(rollout)
        return rollout

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


def make_sharded(make_env: Callable[[], VectorEnv], count: int) -> MakeRollouts:
    """``make_env``: the environment of one shard."""

    def make(env: VectorEnv, policy: Policy, **settings: Any) -> ShardedCollector:
        return ShardedCollector(
            [Collector(make_env(), policy, shard=Shard(i, count), **settings) for i in range(count)],
            shared_starts(env, seed=settings["seed"], failure_weight=settings["failure_weight"]),
        )

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
