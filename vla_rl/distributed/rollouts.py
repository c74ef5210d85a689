"""Rollouts of shards that processes of a Ray cluster collect, as an algorithm sees them."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from policies.policy import Policy
from sims.numbers.finite import NotFinite
from sims.vector_env import StartState, VectorEnv
from vla_rl.config.cluster import ClusterConfig
from vla_rl.config.experiment import Experiment
from vla_rl.distributed.arrays import PackedChunk, PackedRecord, PackedTensors, to_array
from vla_rl.distributed.cluster import connect, disconnect
from vla_rl.distributed.pool import CollectorPool
from vla_rl.distributed.worker import Answer, Request, WorkerSettings
from vla_rl.rollouts.collector import ActedChunk
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.sharded import MakeRollouts, shared_starts, split_offset, split_starts
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.rollouts.timer import Timer

LOG = "cluster.jsonl"


class ClusterRollouts:
    """Rollout r of every shard acts with the weights of version max(0, r - staleness), always: not with the newest.

    So no sample is ever older than ``staleness`` updates, and a run is repeated bit for bit whatever the speed of its
    processes. With staleness 0 the learner waits for its collectors; with 1 they collect the next rollout while it
    learns. Each shard has its part of every batch, so environments that end early are not over-represented.
    """

    def __init__(
        self, pool: CollectorPool, starts: TrainingStarts, *, shards: int, num_envs: int, staleness: int,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.pool, self.starts, self.shards, self.num_envs = pool, starts, shards, num_envs
        self.staleness, self.device, self.timer = staleness, device, Timer()
        self.failures: list[Any] = []
        self._weights: dict[int, Any] = {}  # version -> reference
        self._states = [pool.states[shard] for shard in range(shards)]  # after the rollouts that the learner has taken
        self._answers: dict[tuple[int, int], Answer] = {}
        self._chunks = self._taken = self._asked = self._version = 0
        self._whole_episodes = self._by_chunk = False

    # -- weights --------------------------------------------------------------------------------------------------

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        if version not in self._weights:
            with self.timer.section("sync"):
                self._weights[version] = ray.put(PackedTensors.of(tensors))
        self._version = version
        for old in [known for known in self._weights if known < version - self.staleness]:
            del self._weights[old]
        if self._asked > 0 and not self._whole_episodes and not self._by_chunk:
            self._ask_ahead()

    # -- continuing rollouts --------------------------------------------------------------------------------------

    def collect(self, num_chunks: int) -> Experience:
        self._chunks = num_chunks
        if self._asked == self._taken:  # nothing is under way: rollout r is the one of iteration r
            self._asked = self._taken = self._version
        self._ask_ahead()
        return self._take()

    def _ask_ahead(self) -> None:
        """For every rollout whose weights there are."""
        while self._asked <= self._version + self.staleness:
            self._ask([Request(shard=shard, chunks=self._chunks, **self._next()) for shard in range(self.shards)])

    def _next(self) -> dict[str, Any]:
        version = max(0, self._asked - self.staleness)
        return {"number": self._asked, "version": version, "record": self.timer.recording}

    # -- whole episodes -------------------------------------------------------------------------------------------

    def episodes(self, starts: Sequence[StartState]) -> Experience:
        self._whole_episodes = True
        parts = split_starts(starts, self.shards)
        request = self._next() | {"version": self._version}
        self._ask([Request(shard=shard, starts=part, **request) for shard, part in enumerate(parts)])
        rollout = self._take()
        self.starts.learn(rollout)
        return rollout

    # -- chunk by chunk -------------------------------------------------------------------------------------------

    def act(self, offset: Tensor | None = None) -> ActedChunk:
        self._by_chunk = True
        parts = [None if part is None else to_array(part) for part in split_offset(offset, self.shards)]
        request = self._next() | {"version": self._version, "one_chunk": True}
        self._ask([Request(shard=shard, offset=part, **request) for shard, part in enumerate(parts)])
        packed = self._take_packed()
        with self.timer.section("sync"):
            return ActedChunk.side_by_side([one.unpack(self.device) for one in packed if isinstance(one, PackedChunk)])

    # -- requests -------------------------------------------------------------------------------------------------

    def _ask(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.pool.submit(request, self._weights[request.version])
        self._asked += 1

    def _take(self) -> Experience:
        """The next rollout, when all shards have it."""
        packed = self._take_packed()
        with self.timer.section("sync"):
            parts = [one.unpack().to(self.device) for one in packed if isinstance(one, PackedRecord)]
            return Experience.side_by_side(parts)

    def _take_packed(self) -> list[PackedRecord[Experience] | PackedChunk]:
        """That of each shard."""
        wanted = [(self._taken, shard) for shard in range(self.shards)]
        with self.timer.section("idle"):
            while not all(key in self._answers for key in wanted):
                answer = self.pool.next_answer()
                self._answers[answer.number, answer.shard] = answer
        answers = [self._answers.pop(key) for key in wanted]
        self._note(answers)
        packed = [_rollout(answer) for answer in answers]
        self._states = [answer.state for answer in answers]
        self._taken += 1
        return packed

    def _note(self, answers: Sequence[Answer]) -> None:
        """Times and failures of the collectors, each time as the mean over them."""
        for answer in answers:
            self.failures += answer.failures
            self.timer.add_spans(f"collector {answer.shard % self.pool.count}", answer.spans)
            self.timer.add_shares(answer.times, self.pool.count)

    # -- state ----------------------------------------------------------------------------------------------------

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The collectors have environments of their own."""
        yield

    def state_dict(self) -> dict[str, Any]:
        """As a run in one process saves it, and the older weights that the rollouts under way act with."""
        starts = {"starts": self.starts.state_dict()}
        state: dict[str, Any] = {"shards": list(self._states)} | starts
        if self.shards == 1:
            state = dict(self._states[0]) | (starts if self._whole_episodes else {})
        if self.staleness:
            state["weights"] = {version: ray.get(ref).unpack() for version, ref in self._weights.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        shards = state.get("shards", [state])
        self.starts.load_state_dict(state["starts"])
        self._answers, self._states = {}, list(shards)
        for shard, part in enumerate(shards):
            self.pool.set_state(shard, part)
        weights = state.get("weights", {})
        self._weights = {version: ray.put(PackedTensors.of(tensors)) for version, tensors in weights.items()}
        self._taken = self._asked = 0

    def close(self) -> None:
        self.pool.close()
        disconnect()


def _rollout(answer: Answer) -> PackedRecord[Experience] | PackedChunk:
    if answer.rollout is None:
        assert answer.not_finite is not None
        found = dict(answer.not_finite)
        raise NotFinite(found.pop("quantity"), found.pop("value"), **found)
    return answer.rollout


def make_cluster_rollouts(
    experiment: Experiment, config: ClusterConfig, *, bundle: Path, folder: Path, device: torch.device
) -> MakeRollouts:
    """Of the policy of ``bundle``, for the run in ``folder``."""
    shards = experiment.algorithm.rollout_shards
    settings = WorkerSettings(
        experiment=experiment,
        bundle=bundle.absolute(),
        folder=folder.absolute(),
        device=config.device or str(device),
        threads=config.threads or torch.get_num_threads(),
        hang_s=config.hang_s,
    )

    def make(env: VectorEnv, policy: Policy, *, failure_weight: float, seed: int, **unused: Any) -> ClusterRollouts:
        connect(config, workers=min(config.collectors or shards, shards))
        return ClusterRollouts(
            CollectorPool(settings, config, shards=shards, log=lambda event: _log(folder, event)),
            shared_starts(env, seed=seed, failure_weight=failure_weight),
            shards=shards,
            num_envs=env.spec.num_envs,
            staleness=experiment.algorithm.staleness,
            device=device,
        )

    return make


def _log(folder: Path, event: Mapping[str, Any]) -> None:
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": round(time.time(), 3), **event}) + "\n")
