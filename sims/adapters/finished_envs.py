"""Finished environments of simulators that always step all environments together."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.vector_env import Observation, Step


class FinishedEnvs:
    """How each environment's episode ended, and its last observation.

    A batch simulator continues to simulate environments that have finished. Their later results are ignored, and the
    observation at their end is kept, so that an observation after the end is the true successor.
    """

    elapsed: Int[Tensor, " N"]  # control steps of the present episode

    def __init__(self, num_envs: int, *, max_steps: int, device: torch.device) -> None:
        self.max_steps = max_steps
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.terminated = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.truncated = torch.ones_like(self.terminated)
        self.success = torch.zeros_like(self.terminated)
        self._last: Observation | None = None  # of finished environments, the last observation

    @property
    def finished(self) -> Bool[Tensor, " N"]:
        return self.terminated | self.truncated

    def begin(self, env_ids: Int[Tensor, " n"] | Sequence[int]) -> None:
        self.elapsed[env_ids] = 0
        for flag in (self.terminated, self.truncated, self.success):
            flag[env_ids] = False

    def record(
        self,
        *,
        reward: Float[Tensor, " N"],
        terminated: Bool[Tensor, " N"],
        truncated: Bool[Tensor, " N"],
        success: Bool[Tensor, " N"],
        observe: Callable[[], Observation],
    ) -> Step:
        """What the simulator reported of one control step; ``observe`` gives all environments after that step."""
        running = ~self.finished
        self.elapsed += running
        self.success |= running & success
        self.terminated |= running & (terminated | success)
        out_of_time = truncated | (self.elapsed >= self.max_steps)
        self.truncated |= running & out_of_time & ~self.terminated
        ended = running & self.finished
        if ended.any():
            self._keep(ended, observe())
        return Step(
            reward=torch.where(running, reward.float(), 0.0),
            terminated=self.terminated.clone(),
            truncated=self.truncated.clone(),
            success=self.success.clone(),
            intervened=torch.zeros_like(running),
        )

    def observation(self, present: Observation) -> Observation:
        """``present`` with the last observation of each finished environment."""
        return present if self._last is None else self._last.where(self.finished, present)

    def _keep(self, ended: Bool[Tensor, " N"], last: Observation) -> None:
        self._last = last.map(torch.clone) if self._last is None else last.where(ended, self._last)
