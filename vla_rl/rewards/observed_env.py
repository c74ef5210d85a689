"""An environment whose reward depends on what is observed: nothing is rendered twice."""

from __future__ import annotations

import dataclasses
import io
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sims.devices.crossing import crossing
from sims.env_wrapper import EnvWrapper
from sims.vector_env import Observation, StartState, Step, VectorEnv


class ObservedEnv(EnvWrapper):
    """A subclass begins episodes by ``begin``, steps by ``stepped``, observes by ``see``, and sets ``_ended``."""

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env)
        self._seen: dict[int, Observation] = {}  # present observations that are known, of single environments
        self._ended: Bool[Tensor, " N"] = torch.ones(env.spec.num_envs, dtype=torch.bool)

    def begin(
        self, env_ids: list[int], start: Sequence[StartState]
    ) -> Sequence[tuple[Sequence[float] | None, StartState]]:
        """Reset these environments: of each the numbers that ``packed`` put into its start, if any, and the rest."""
        states = [(None, one) if one.snapshot is None else unpacked(one) for one in start]
        self.env.reset(env_ids, start=[inner for _, inner in states])
        self._moved(env_ids)
        self._ended[env_ids] = False
        return states

    def stepped(self, action: Float[Tensor, "N A"]) -> tuple[Step, Bool[Tensor, " N"]]:
        """One control step of the environment, on the host, and which environments were running before it."""
        inner = self.env.step(action)
        with crossing("outcomes"):
            seen = inner.to("cpu")
        running = ~self._ended
        self._moved(running.nonzero().flatten().tolist())
        return seen, running

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        ids = self.spec.ids(env_ids)
        unseen = [env_id for env_id in ids if env_id not in self._seen]
        if len(unseen) == len(ids):
            return self.env.observe(None if env_ids is None else ids)
        fresh = dict(zip(unseen, _rows(self.env.observe(unseen)), strict=True)) if unseen else {}
        return Observation.stack([self._seen[i] if i in self._seen else fresh[i] for i in ids])

    def see(self, env_ids: Sequence[int]) -> Observation:
        """Observe these environments, and keep it until they move."""
        obs = self.env.observe(env_ids).map(torch.clone)  # the environment may use its buffers again
        self._seen.update(zip(env_ids, _rows(obs), strict=True))
        return obs

    def is_seen(self, env_id: int) -> bool:
        return env_id in self._seen

    def _moved(self, env_ids: Iterable[int]) -> None:
        for env_id in env_ids:
            self._seen.pop(env_id, None)


def _rows(obs: Observation) -> list[Observation]:
    return [obs[i] for i in range(len(obs))]


def packed(inner: StartState, numbers: Sequence[float]) -> StartState:
    """``inner`` whose snapshot also holds ``numbers``: the bytes of two arrays."""
    file = io.BytesIO()
    np.save(file, np.array(numbers, dtype=np.float64), allow_pickle=False)
    assert inner.snapshot is not None
    np.save(file, inner.snapshot, allow_pickle=False)
    return dataclasses.replace(inner, snapshot=np.frombuffer(file.getvalue(), dtype=np.uint8).copy())


def unpacked(start: StartState) -> tuple[list[float], StartState]:
    """What ``packed`` was given."""
    assert start.snapshot is not None
    file = io.BytesIO(start.snapshot.tobytes())
    numbers = np.load(file, allow_pickle=False).tolist()
    return numbers, dataclasses.replace(start, snapshot=np.load(file, allow_pickle=False))
