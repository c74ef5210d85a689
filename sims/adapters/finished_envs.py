"""Standing still, for simulators whose rows always move together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from sims.vector_env import Observation, Step


class FinishedEnvs:
    """How each row's episode ended and what it showed then.

    A batch simulator goes on computing rows that have ended. Their later numbers are ignored, and what they showed at
    their end is kept, so that an observation after it is the true successor.
    """

    def __init__(self, num_rows: int, *, max_steps: int, device: torch.device) -> None:
        self.max_steps = max_steps
        self.elapsed = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.terminated = torch.zeros(num_rows, dtype=torch.bool, device=device)
        self.truncated = torch.ones_like(self.terminated)
        self.success = torch.zeros_like(self.terminated)
        self._last: Observation | None = None  # of rows that stand, what they showed

    @property
    def standing(self) -> Tensor:
        return self.terminated | self.truncated

    def begin(self, rows: Tensor) -> None:
        self.elapsed[rows] = 0
        for flag in (self.terminated, self.truncated, self.success):
            flag[rows] = False

    def record(
        self,
        *,
        reward: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        success: Tensor,
        look: Callable[[], Observation],
    ) -> Step:
        """What the simulator reported of one control step, each [N]; ``look`` shows all rows as the step left them."""
        moving = ~self.standing
        self.elapsed += moving
        self.success |= moving & success
        self.terminated |= moving & (terminated | success)
        out_of_time = truncated | (self.elapsed >= self.max_steps)
        self.truncated |= moving & out_of_time & ~self.terminated
        ended = moving & self.standing
        if ended.any():
            self._keep(ended, look())
        return Step(
            reward=torch.where(moving, reward.float(), 0.0),
            terminated=self.terminated.clone(),
            truncated=self.truncated.clone(),
            success=self.success.clone(),
            intervened=torch.zeros_like(moving),
        )

    def shown(self, live: Observation) -> Observation:
        """``live`` with what standing rows showed at their end."""
        return live if self._last is None else self._last.where(self.standing, live)

    def _keep(self, rows: Tensor, seen: Observation) -> None:
        self._last = seen.map(torch.clone) if self._last is None else seen.where(rows, self._last)
