"""An environment that pays for progress, besides what it pays itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sims.devices.crossing import crossing
from sims.numbers.finite import check_finite, check_observation
from sims.numbers.ranges import PositiveFloat, PositiveInt, Share
from sims.vector_env import Observation, StartState, Step, VectorEnv
from vla_rl.rewards.observed_env import ObservedEnv, packed
from vla_rl.rewards.scorer import Sensors, select_cameras, sensors_of


@runtime_checkable
class Progress(Protocol):
    """Whatever tells progress from an observation: a fitted model (model.py), or one that nothing was fitted to
    (zero_shot.py)."""

    @property
    def device(self) -> torch.device: ...

    def cameras_among(self, sensors: Sensors, where: str) -> list[int]:
        """Which cameras it needs of ``sensors``, those of ``where``. RewardModelError where they do not fit."""
        ...

    def progress(self, obs: Observation) -> Float[Tensor, " B"]:
        """0 to 1; ``obs.images``: of those cameras."""
        ...


@dataclass(frozen=True, kw_only=True)
class PaidProgressConfig:
    """What all rewards for progress share: the environment's own, and ``weight`` times the change of progress.

    ``every``: control steps between two observations of the progress. ``min_change``: smaller changes are paid
    once they have added up to it; success and failure always are.
    """

    weight: PositiveFloat = 0.5
    every: PositiveInt = 4
    min_change: Share = 0.0


class ProgressEnv(ObservedEnv):
    """Adds ``weight`` times the change of progress since it was last known to the environment's own reward.

    Progress is known at the start, every ``every`` control steps and where the time runs out; it is 1 at success and 0
    where an episode fails otherwise. A change by less than ``min_change`` is as if it had not been seen. So an episode
    is paid ``weight`` times (its last known progress - its first) in all: to linger or to go back and forth adds
    nothing, and nothing pays as much as success (potentials, Ng, Harada and Russell 1999, without discount). Success is
    the environment's own.
    """

    def __init__(self, env: VectorEnv, model: Progress, config: PaidProgressConfig) -> None:
        super().__init__(env)
        self.model, self.config = model, config
        self._cameras = model.cameras_among(sensors_of(env.spec), env.spec.name)
        n = env.spec.num_envs
        self._elapsed: Int[Tensor, " N"] = torch.zeros(n, dtype=torch.int64)  # control steps
        self._known: Float[Tensor, " N"] = torch.zeros(n)  # progress when it was last known

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        ids = self.spec.ids(env_ids)
        states = self.begin(ids, start)
        self._elapsed[ids] = 0
        if new := [env_id for env_id, (kept, _) in zip(ids, states, strict=True) if kept is None]:
            self._known[new] = self._progress(new)
        for env_id, (kept, _) in zip(ids, states, strict=True):
            if kept is not None:
                for part, number in zip(self._kept(), kept, strict=True):
                    part[env_id] = number

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """Snapshots hold the environment's own one and what is known of the progress."""
        ids = self.spec.ids(env_ids)
        captured = zip(ids, self.env.capture(ids), strict=True)
        return tuple(packed(inner, [float(part[env_id]) for part in self._kept()]) for env_id, inner in captured)

    def _kept(self) -> tuple[Tensor, ...]:
        return self._elapsed, self._known, self._ended

    @torch.no_grad()
    def step(self, action: Float[Tensor, "N A"]) -> Step:
        seen, running = self.stepped(action)
        self._elapsed += running
        before, terminated = self._known.clone(), running & seen.terminated
        self._known = torch.where(terminated, seen.success.float(), self._known)
        due = running & seen.valid & ~terminated & (seen.truncated | (self._elapsed % self.config.every == 0))
        if ids := due.nonzero().flatten().tolist():
            found, known = self._progress(ids), self._known[ids]
            self._known[ids] = torch.where((found - known).abs() >= self.config.min_change, found, known)
        self._ended |= seen.done
        gained = self.config.weight * (self._known - before)
        with crossing("outcomes"):
            return dataclasses.replace(seen, reward=seen.reward + gained).to(self.spec.device)

    def _progress(self, env_ids: list[int]) -> Float[Tensor, " n"]:
        obs = self.see(env_ids)
        check_observation(obs, env_ids, self.spec.name)
        progress = self.model.progress(select_cameras(self._cameras, obs, self.model.device))
        check_finite("progress", progress, ("environment",))
        with crossing("outcomes"):
            return progress.cpu()
