"""A VectorEnv that is observed at regular intervals, whoever steps it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sims.env_wrapper import EnvWrapper
from sims.vector_env import StartState, Step, VectorEnv


class ObserveEvery(EnvWrapper):
    """Observes ``env`` every ``every`` control steps and at every episode's end, for a recorder below.

    Without the observation at the end no recording would show a success.
    """

    def __init__(self, env: VectorEnv, *, every: int) -> None:
        super().__init__(env)
        self.every, self._count = every, 0
        self._running = torch.zeros(env.spec.num_envs, dtype=torch.bool)

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        self.env.reset(env_ids, start=start)
        self._running[range(self.spec.num_envs) if env_ids is None else list(env_ids)] = True
        self._count = 0

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        self._count += 1
        ended = (step.terminated | step.truncated).cpu()
        due = self._running & (ended | torch.tensor(self._count % self.every == 0))
        self._running &= ~ended
        if due.any():
            self.env.observe(due.nonzero().flatten().tolist())
        return step
