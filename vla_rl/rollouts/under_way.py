"""Episodes that are not complete yet, chunk by chunk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from sims.devices.crossing import crossing
from sims.starts import Restarts
from sims.vector_env import StartState
from vla_rl.rollouts.experience import Experience, clear_invalid


class EpisodesUnderWay:
    """``starts``: of the episode in each environment, None where none is under way. ``alive``: it has not ended (on the
    host). Environments ``[g * size, (g + 1) * size)`` are group g."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.starts: list[StartState | None] = [None] * num_envs
        self.alive = torch.zeros(num_envs, dtype=torch.bool)
        self._restarts = [Restarts() for _ in range(num_envs)]  # of the episode in each environment
        self._begin = [0] * num_envs  # which of the chunks is an episode's first
        self._chunks: list[Experience] = []
        self._used: list[Tensor] = []  # [N] of each chunk: part of an episode
        self._loaded: list[list[Tensor]] = []  # chunks of a saved state, until a new one says which tensor is what

    @property
    def begun(self) -> bool:
        return any(start is not None for start in self.starts)

    def begin(self, env_ids: Sequence[int], starts: Sequence[StartState]) -> None:
        for env_id, start in zip(env_ids, starts, strict=True):
            self.starts[env_id], self._begin[env_id] = start, len(self._used)
            self._restarts[env_id] = Restarts()
        self.alive[list(env_ids)] = True

    def add(self, chunk: Experience, done: Bool[Tensor, " N"], valid: Bool[Tensor, " N"]) -> list[int]:
        """The next chunk of the environments that are alive. Returns those whose simulator failed: their episodes start
        again, what they gave is not used. UserError where that goes on (``Restarts``)."""
        if self._loaded:
            with crossing("checkpoint"):
                self._chunks = [chunk.with_tensors(saved) for saved in self._loaded]
            self._loaded = []
        failed = self.alive & ~valid
        again = failed.nonzero().flatten().tolist()
        for env_id in again:
            if (start := self.starts[env_id]) is not None:
                self._restarts[env_id].add([start])
        self._chunks.append(chunk)
        self._used = [flags & ~failed for flags in [*self._used, self.alive & valid]]
        self.alive = self.alive & (~done | failed)
        return again

    def groups(self, size: int, *, complete: bool) -> list[int]:
        """Those whose episodes have all ended; or those that are free."""
        alive = self.alive.reshape(-1, size).any(1).tolist()
        begun = [start is not None for start in self.starts[::size]]
        return [g for g in range(len(alive)) if not alive[g] and begun[g] == complete]

    def take(self, groups: Iterable[int], size: int) -> Experience:
        """[T, N] of ``groups``, which are complete, side by side: those that began first come first. They are free."""
        by_begin: dict[int, list[int]] = {}
        for g in groups:
            by_begin.setdefault(self._begin[g * size], []).extend(range(g * size, (g + 1) * size))
        parts = [self._of(begin, env_ids) for begin, env_ids in sorted(by_begin.items())]
        for env_id in (env_id for env_ids in by_begin.values() for env_id in env_ids):
            self.starts[env_id] = None
        self._drop_unused()
        return parts[0] if len(parts) == 1 else Experience.side_by_side(parts)

    def _of(self, begin: int, env_ids: list[int]) -> Experience:
        chunks, used = Experience.stack(self._chunks[begin:]), torch.stack(self._used[begin:])
        if len(env_ids) < self.num_envs:
            with crossing("starts"):
                chunks = chunks.select_envs(torch.tensor(env_ids).to(chunks.reward.device))
            used = used[:, env_ids]
        with crossing("outcomes"):
            return clear_invalid(chunks, used.to(chunks.reward.device))

    def _drop_unused(self) -> None:
        begun = [begin for begin, start in zip(self._begin, self.starts, strict=True) if start is not None]
        first = min(begun, default=len(self._used))
        self._chunks, self._used = self._chunks[first:], self._used[first:]
        self._begin = [max(0, begin - first) for begin in self._begin]

    def state_dict(self) -> dict[str, Any]:
        """Of the tensors themselves: chunks never change, and a state is asked for before every iteration."""
        return {
            "starts": [None if start is None else asdict(start) for start in self.starts],
            "alive": self.alive.clone(),
            "begin": list(self._begin),
            "used": list(self._used),
            "chunks": self._loaded or [list(chunk.tensors()) for chunk in self._chunks],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.starts = [None if start is None else StartState(**start) for start in state["starts"]]
        self.alive, self._begin = state["alive"].clone(), list(state["begin"])
        self._used, self._loaded, self._chunks = list(state["used"]), list(state["chunks"]), []
