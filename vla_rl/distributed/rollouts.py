"""Rollouts of shards that processes of a Ray cluster collect, as an algorithm sees them."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
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
from vla_rl.rollouts.ahead import Asked, asked_ahead, state_ahead
from vla_rl.rollouts.collector import ActedChunk, Offset, unchanged
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.sharded import MakeRollouts, shared_starts, split_offset, split_starts
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.rollouts.timer import Timer

LOG = "cluster.jsonl"


class ClusterRollouts:
    """Rollout r of every shard acts with the weights that were published after rollout r - 1 - staleness was learned
    from, always: not with the newest.

    So a run is repeated bit for bit whatever the speed of its processes, and a collector that is faster than the
    learner waits: ``staleness`` rollouts of a shard are asked for ahead, no more. With staleness 0 the learner waits
    for its collectors; with 1 they collect the next rollout while it learns. Each shard has its part of every batch, so
    environments that end early are not over-represented. ``kept``: as of a Collector; what ``policy`` stored is where
    one process has it.
    """

    def __init__(
        self, pool: CollectorPool, starts: TrainingStarts, *, shards: int, num_envs: int, staleness: int,
        policy: Policy, kept: int,
    ) -> None:  # fmt: skip
        self.pool, self.starts, self.shards, self.num_envs = pool, starts, shards, num_envs
        self.staleness, self.policy, self.kept, self.timer = staleness, policy, kept, Timer()
        self.failures: list[Any] = []
        self._weights: dict[int, Any] = {}  # version -> reference, of the newest and of those of ``_ahead``
        self._states = [pool.states[shard] for shard in range(shards)]  # after the rollouts that the learner has taken
        self._answers: dict[tuple[int, int], Answer] = {}
        self._ahead = deque[Asked]()
        self._taken = self._asked = self._version = 0
        self._whole_episodes = False

    # -- weights --------------------------------------------------------------------------------------------------

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        if version not in self._weights:
            with self.timer.section("sync"):
                self._weights[version] = ray.put(PackedTensors.of(tensors))
        self._version = version
        needed = {version, *(asked.version for asked in self._ahead)}
        self._weights = {known: ref for known, ref in self._weights.items() if known in needed}

    # -- continuing rollouts, chunk by chunk ----------------------------------------------------------------------

    def collect(self, num_chunks: int) -> Experience:
        self._ask_ahead(lambda ahead: Asked(version=self._version, chunks=num_chunks))
        return self._take()

    def act(self, offset: Offset = unchanged) -> ActedChunk:
        self._ask_ahead(lambda ahead: Asked(version=self._version, offset=offset(ahead)))
        packed = self._take_packed()
        with self.timer.section("sync"):
            return ActedChunk.side_by_side(
                [one.unpack(self.policy.device) for one in packed if isinstance(one, PackedChunk)]
            )

    def _ask_ahead(self, ask: Callable[[int], Asked]) -> None:
        while len(self._ahead) <= self.staleness:
            self._submit(ask(len(self._ahead)))

    def _submit(self, asked: Asked) -> None:
        parts = [None if part is None else to_array(part) for part in split_offset(asked.offset, self.shards)]
        request = self._next(asked.version) | {"chunks": asked.chunks}
        self._ask([Request(shard=shard, offset=part, **request) for shard, part in enumerate(parts)])
        self._ahead.append(asked)

    # -- whole episodes -------------------------------------------------------------------------------------------

    def episodes(self, starts: Sequence[StartState]) -> Experience:
        self._whole_episodes = True
        parts, request = split_starts(starts, self.shards), self._next(self._version)
        self._ask([Request(shard=shard, starts=part, **request) for shard, part in enumerate(parts)])
        rollout = self._take()
        self.starts.learn(rollout)
        return rollout

    # -- requests -------------------------------------------------------------------------------------------------

    def _next(self, version: int) -> dict[str, Any]:
        return {"number": self._asked, "version": version, "record": self.timer.recording}

    def _ask(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.pool.submit(request, self._weights[request.version])
        self._asked += 1

    def _take(self) -> Experience:
        """The next rollout, when all shards have it."""
        packed = self._take_packed()
        with self.timer.section("sync"):
            parts = [one.unpack() for one in packed if isinstance(one, PackedRecord)]
            inputs = self.policy.stored_on(max(self.kept, sum(part.valid.numel() for part in parts)))
            return Experience.side_by_side([part.placed(self.policy.device, inputs=inputs) for part in parts])

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
        if self._ahead:
            self._ahead.popleft()
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
        """As a run in one process saves it. Weights stay in the object store's memory, also beyond its end, until a
        checkpoint reads them: a state is asked for before every iteration, and few are written."""
        starts = {"starts": self.starts.state_dict()}
        state: dict[str, Any] = {"shards": list(self._states)} | starts
        if self.shards == 1:
            ours = self._whole_episodes or self.starts.ucb is not None
            state = dict(self._states[0]) | (starts if ours else {})
        if self.staleness:
            versions = {asked.version for asked in self._ahead}
            weights = {version: ray.get(self._weights[version]) for version in sorted(versions)}
            state |= state_ahead(self._ahead, weights)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        shards = state.get("shards", [state])
        self.starts.load_state_dict(state["starts"])
        self._answers, self._states = {}, list(shards)
        for shard, part in enumerate(shards):
            self.pool.set_state(shard, part)
        weights = state.get("weights", {})
        self._weights = {version: ray.put(PackedTensors.of(tensors)) for version, tensors in weights.items()}
        self._ahead.clear()
        self._taken = self._asked
        for asked in asked_ahead(state, self.policy.device):
            self._submit(asked)

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

    def make(
        env: VectorEnv, policy: Policy, *, failure_weight: float, seed: int, kept: int = 0, **unused: Any
    ) -> ClusterRollouts:
        connect(config, workers=min(config.collectors or shards, shards))
        try:
            pool = CollectorPool(
                replace(settings, kept=kept), config, shards=shards, log=lambda event: _log(folder, event)
            )
        except BaseException:  # nobody has rollouts to close, and a process cannot connect twice
            disconnect()
            raise
        return ClusterRollouts(
            pool,
            shared_starts(env, seed=seed, failure_weight=failure_weight),
            shards=shards,
            num_envs=env.spec.num_envs,
            staleness=experiment.algorithm.staleness,
            policy=policy,
            kept=kept,
        )

    return make


def _log(folder: Path, event: Mapping[str, Any]) -> None:
    with (folder / LOG).open("a", encoding="utf-8") as file:
        file.write(json.dumps({"time": round(time.time(), 3), **event}) + "\n")
