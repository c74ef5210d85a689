"""Finished environments of simulators that always step all environments together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.vector_env import Observation, Step


class FinishedEnvs:
    """How each environment's episode ended, and its last observation.

    A batch simulator continues to simulate environments that have finished. Their later results are ignored, and the
    observation at their end is kept, so that an observation after the end is the true successor. Everything stays on
    the device: no step waits for it.
    """

    CAPTURED = 4  # numbers of an environment in ``captured``
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

    def captured(self) -> Float[Tensor, "N 4"]:
        """Of each environment, for ``restore``: elapsed control steps, terminated, truncated, success."""
        return torch.stack([self.elapsed, self.terminated, self.truncated, self.success], dim=1).float()

    def restore(self, env_ids: Int[Tensor, " n"], captured: Float[Tensor, "n 4"]) -> None:
        self.elapsed[env_ids] = captured[:, 0].long()
        self.terminated[env_ids], self.truncated[env_ids], self.success[env_ids] = captured[:, 1:].bool().unbind(1)

    def record(
        self,
        *,
        reward: Float[Tensor, " N"] | None,
        terminated: Bool[Tensor, " N"],
        truncated: Bool[Tensor, " N"],
        success: Bool[Tensor, " N"],
        last: Observation | None = None,
    ) -> Step:
        """What the simulator reported of one control step.

        ``reward`` None is the sparse one: 1 for success, otherwise 0. ``last``: where environments may have ended, the
        observations of all after this step; a simulator that can return to a state keeps the state instead.
        """
        paid = success if reward is None else reward
        running = ~self.finished
        self.elapsed += running
        self.success |= running & success
        self.terminated |= running & (terminated | success)
        out_of_time = truncated | (self.elapsed >= self.max_steps)
        self.truncated |= running & out_of_time & ~self.terminated
        ended = running & self.finished
        if last is not None:
            self._last = last.map(torch.clone) if self._last is None else last.where(ended, self._last)
        return Step(
            reward=torch.where(running, paid.float(), 0.0),
            terminated=self.terminated.clone(),
            truncated=self.truncated.clone(),
            success=self.success.clone(),
            intervened=torch.zeros_like(running),
        )

    def observation(self, present: Observation) -> Observation:
        """``present`` with the last observation of each finished environment."""
        return present if self._last is None else self._last.where(self.finished, present)
