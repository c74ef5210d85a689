"""Rollouts that are asked for before they are taken, by the weights that were the newest when they were asked for.

With ``staleness`` k rollout r is asked for when rollout r - k is about to be taken: so it acts with the weights that
were published after rollout r - k - 1 was learned from, and while the learner learns at most k rollouts are waiting.
k = 1; the first two act with the weights of the start:

    learner      ask 0, ask 1, take 0 | learn 0, publish | ask 2, take 1 | learn 1, publish | ask 3, take 2 | learn 2
    collectors   acting 0             | acting 1                         | acting 2                         | acting 3
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from policies.policy import Policy
from sims.vector_env import StartState, VectorEnv
from vla_rl.critics.value import ValueCritic
from vla_rl.rollouts.collector import ActedChunk, Offset, unchanged
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.failures import RestartingEnv
from vla_rl.rollouts.sharded import MakeRollouts, Rollouts
from vla_rl.rollouts.weights import load_weights


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A rollout by weights ``version``: ``chunks`` of each environment, or, where that is None, one chunk, with
    ``offset`` added to its actions."""

    version: int
    chunks: int | None = None
    offset: Float[Tensor, "N H A"] | None = None


@dataclass(frozen=True, kw_only=True)
class _Collected:
    """``state``: of the collectors before it."""

    asked: Asked
    state: Mapping[str, Any]
    rollout: Any


class RolloutsAhead:
    """Those of ``inner``, in this process, each collected when it is asked for: the numbers are those of a cluster,
    bit for bit, and nothing overlaps.

    ``policy`` and ``critic``: what ``inner`` acts with and the learner changes.
    """

    def __init__(self, inner: Rollouts, policy: Policy, critic: ValueCritic | None, *, staleness: int) -> None:
        self.inner, self.policy, self.critic, self.staleness = inner, policy, critic, staleness
        self.num_envs, self.starts, self.timer = inner.num_envs, inner.starts, inner.timer
        self._version, self._newest = 0, dict[str, Tensor]()
        self._weights = dict[int, Mapping[str, Tensor]]()  # copies of those of ``_ahead``
        self._ahead = deque[_Collected]()

    @property
    def failures(self) -> Sequence[Any]:
        return self.inner.failures if isinstance(self.inner, RestartingEnv) else ()

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._version, self._newest = version, dict(tensors)
        self.inner.publish(version, tensors)

    def collect(self, num_chunks: int) -> Experience:
        self._ask_ahead(lambda ahead: Asked(version=self._version, chunks=num_chunks))
        rollout: Experience = self._take()
        return rollout

    def act(self, offset: Offset = unchanged) -> ActedChunk:
        self._ask_ahead(lambda ahead: Asked(version=self._version, offset=offset(ahead)))
        chunk: ActedChunk = self._take()
        return chunk

    def episodes(self, starts: Sequence[StartState]) -> Experience:
        """By the newest weights."""
        return self.inner.episodes(starts)

    def _ask_ahead(self, ask: Callable[[int], Asked]) -> None:
        while len(self._ahead) <= self.staleness:
            self._collect(ask(len(self._ahead)))

    def _collect(self, asked: Asked) -> None:
        if asked.version not in self._weights:
            self._weights[asked.version] = {name: tensor.detach().clone() for name, tensor in self._newest.items()}
        state = self.inner.state_dict()
        rollout = self.inner.act(lambda _: asked.offset) if asked.chunks is None else self.inner.collect(asked.chunks)
        self._ahead.append(_Collected(asked=asked, state=state, rollout=rollout))

    def _take(self) -> Any:
        taken = self._ahead.popleft()
        needed = {one.asked.version for one in self._ahead}
        self._weights = {version: tensors for version, tensors in self._weights.items() if version in needed}
        return taken.rollout

    @contextmanager
    def suspended(self) -> Iterator[None]:
        with self.inner.suspended():
            yield

    def state_dict(self) -> dict[str, Any]:
        """As before the first rollout that was not taken, with what was asked for since."""
        state = self._ahead[0].state if self._ahead else self.inner.state_dict()
        return dict(state) | state_ahead([one.asked for one in self._ahead], self._weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Collects what was asked for once more, by the weights that acted: the policy is left with these."""
        self._ahead.clear()
        self._weights = {}
        self.inner.load_state_dict(state)
        for asked in asked_ahead(state, self.policy.device):
            weights = state["weights"][asked.version]
            load_weights(self.policy, self.critic, weights)
            self.publish(asked.version, weights)
            self._collect(asked)

    def close(self) -> None:
        self.inner.close()


def state_ahead(asked: Sequence[Asked], weights: Mapping[int, Mapping[str, Tensor]]) -> dict[str, Any]:
    """For a checkpoint: what was asked for and not taken, and the weights that it acts with, by version."""
    return {"ahead": [asdict(one) for one in asked], "weights": dict(weights)}


def asked_ahead(state: Mapping[str, Any], device: torch.device) -> list[Asked]:
    """From a ``state_dict`` with ``state_ahead``, or without: nothing."""
    asked = [Asked(**one) for one in state.get("ahead", ())]
    return [one if one.offset is None else replace(one, offset=one.offset.to(device)) for one in asked]


def make_ahead(make_rollouts: MakeRollouts, staleness: int) -> MakeRollouts:
    """Those of ``make_rollouts``, asked for ``staleness`` ahead."""

    def make(env: VectorEnv, policy: Policy, *, critic: ValueCritic | None, **settings: Any) -> RolloutsAhead:
        return RolloutsAhead(make_rollouts(env, policy, critic=critic, **settings), policy, critic, staleness=staleness)

    return make
