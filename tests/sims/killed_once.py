"""A crash of a worker process at a step that a test chooses."""

from __future__ import annotations

import os
import signal

from torch import Tensor

from sims.env_wrapper import EnvWrapper
from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import Step


class KilledOnce(EnvWrapper):
    """Kills the worker process of environment 0 before its step ``at``, counted from 0, as a crash would."""

    def __init__(self, pool: SubprocVectorEnv, *, at: int) -> None:
        super().__init__(pool)
        self.pool, self.at, self.steps = pool, at, 0

    def step(self, action: Tensor) -> Step:
        if self.steps == self.at:
            os.kill(self.pool.worker_pids[0], signal.SIGKILL)
        self.steps += 1
        return super().step(action)
