"""Which episodes GRPO learns from: as many of each start, or more of the starts whose outcomes are rarely mixed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from sims.devices.crossing import crossing
from sims.vector_env import StartState
from vla_rl.algorithms.advantages import informative_groups
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.starts import TrainingStarts

Advantages = Callable[[Experience, int], Experience]
"""Fills advantages and weights of episodes [T, N] in groups of so many neighbors."""


@runtime_checkable
class GroupSampling(Protocol):
    """Round by round: which starts are tried, and what is learned from. ``wanted``: that, in words of an error."""

    wanted: str

    def starts(self, count: int, stream: TrainingStarts) -> list[StartState]:
        """Of the ``count`` groups of the next round; those that are new come last."""
        ...

    def add(self, rollout: Experience, success: Bool[Tensor, "groups G"], wanted: int) -> list[Experience]:
        """The groups [T, G] or several side by side, at most ``wanted``, that are complete with this round, of its
        episodes [T, groups * G] and their outcomes (on the host)."""
        ...

    def rest(self, wanted: int) -> list[Experience]:
        """Groups that are not complete but of use, where there are no more rounds."""
        ...


class FixedGroups:
    """One group of each start; only those with mean success in [low, high] are learned from."""

    def __init__(self, advantages: Advantages, *, low: float, high: float) -> None:
        self._advantages, self._low, self._high = advantages, low, high
        self.wanted = f"group with success between {low} and {high}"

    def starts(self, count: int, stream: TrainingStarts) -> list[StartState]:
        return stream.take(count)

    def add(self, rollout: Experience, success: Bool[Tensor, "groups G"], wanted: int) -> list[Experience]:
        size = success.shape[1]
        good = informative_groups(success, low=self._low, high=self._high).nonzero().flatten()[:wanted]
        if not len(good):
            return []
        chosen = (good[:, None] * size + torch.arange(size)).flatten()
        with crossing("starts"):
            return [self._advantages(rollout.select_envs(chosen.to(rollout.success.device)), size)]

    def rest(self, wanted: int) -> list[Experience]:
        return []


class _Pool:
    """All episodes of one start so far: [T_i, G] of each round."""

    def __init__(self, start: StartState) -> None:
        self.start, self.rounds, self.success = start, list[Experience](), torch.zeros(0, dtype=torch.bool)

    def add(self, episodes: Experience, success: Bool[Tensor, " G"]) -> None:
        self.rounds.append(episodes)
        self.success = torch.cat([self.success, success])

    @property
    def mixed(self) -> bool:
        return bool(self.success.any()) and not bool(self.success.all())

    def balanced(self, size: int) -> bool:
        wins = int(self.success.sum())
        return wins >= size // 2 and len(self.success) - wins >= size - size // 2


class AdaptiveGroups:
    """A start gets a group in each of up to ``rounds`` rounds, until its episodes hold half a group of each outcome.

    Reinforce-Ada (Xiong et al. 2025, arXiv:2510.04996), the balanced exit of the authors' code: ``size`` episodes of
    all are learned from, half of them successes where there are as many; their advantages are relative to all, for the
    mean of what was chosen says nothing about the start. Starts that a filter of single groups drops are used.
    """

    wanted = "start whose episodes had both outcomes"

    def __init__(self, advantages: Advantages, *, size: int, rounds: int) -> None:
        self._advantages, self._size, self._rounds = advantages, size, rounds
        self._open: list[_Pool] = []

    def starts(self, count: int, stream: TrainingStarts) -> list[StartState]:
        self._open += [_Pool(start) for start in stream.take(count - len(self._open))]
        return [pool.start for pool in self._open]

    def add(self, rollout: Experience, success: Bool[Tensor, "groups G"], wanted: int) -> list[Experience]:
        size, device = self._size, rollout.success.device
        for number, (pool, outcomes) in enumerate(zip(self._open, success, strict=True)):
            pool.add(rollout.select_envs(torch.arange(number * size, (number + 1) * size, device=device)), outcomes)
        ended = [pool for pool in self._open if pool.balanced(size) or len(pool.rounds) == self._rounds]
        self._open = [pool for pool in self._open if pool not in ended]
        return self._chosen(ended, wanted)

    def rest(self, wanted: int) -> list[Experience]:
        return self._chosen(self._open, wanted)

    def _chosen(self, pools: list[_Pool], wanted: int) -> list[Experience]:
        return [self._of(pool) for pool in pools if pool.mixed][:wanted]

    def _of(self, pool: _Pool) -> Experience:
        episodes = self._advantages(Experience.side_by_side(pool.rounds), len(pool.success))
        with crossing("starts"):
            return episodes.select_envs(balanced_choice(pool.success, self._size).to(episodes.success.device))


def balanced_choice(success: Bool[Tensor, " n"], size: int) -> Int[Tensor, " size"]:
    """``size`` of n >= size episodes in their order, half of them successes (rounded down) where there are as many."""
    wins, losses = success.nonzero().flatten(), (~success).nonzero().flatten()
    from_wins = min(len(wins), max(size // 2, size - len(losses)))
    return torch.cat([wins[:from_wins], losses[: size - from_wins]]).sort().values
