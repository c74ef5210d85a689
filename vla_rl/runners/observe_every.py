"""A VectorEnv that is observed at regular intervals, whoever steps it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sims.env_wrapper import EnvWrapper
from sims.vector_env import StartState, Step, VectorEnv


class ObserveEvery(EnvWrapper):
    """Observes each environment every ``every`` control steps of its episode and at the end, for a recorder below.

    Its first observation, after ``reset``, is left to the caller. Without the one at the end no recording would show a
    success. An environment that failed (``Step.valid``) is not observed.
    """

    def __init__(self, env: VectorEnv, *, every: int) -> None:
        super().__init__(env)
        self.every = every
        self._steps = torch.zeros(env.spec.num_envs, dtype=torch.int64)  # of the present episodes
        self._running = torch.zeros(env.spec.num_envs, dtype=torch.bool)

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        self.env.reset(env_ids, start=start)
        begun = self.spec.ids(env_ids)
        self._running[begun], self._steps[begun] = True, 0

    def step(self, action: Tensor) -> Step:
        step = self.env.step(action)
        self._steps += 1
        ended = step.done.cpu()
        due = self._running & step.valid.cpu() & (ended | (self._steps % self.every == 0))
        self._running &= ~ended
        if due.any():
            self.env.observe(due.nonzero().flatten().tolist())
        return step
