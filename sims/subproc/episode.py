"""What every simulator's episode has in common, around a SingleEnv: its end, and how to return to any point of it."""

from __future__ import annotations

from collections import deque

import numpy as np

from sims.subproc.latency import Latency, draw_latency
from sims.subproc.single_env import SingleEnv

NO_LATENCY = Latency()


class Episode:
    """An episode that stands still once it ended.

    A state is restored by running its actions again from the start: exact in every deterministic simulator, where
    writing positions and velocities back would lose the solver's warm start, contacts and the simulator's own clocks.
    """

    def __init__(self, env: SingleEnv, latency: Latency = NO_LATENCY) -> None:
        self.env, self.latency = env, latency
        self._waiting: deque[np.ndarray] = deque()  # chosen actions that have no effect yet
        self.elapsed = 0
        self.terminated = self.truncated = self.success = False

    @property
    def standing(self) -> bool:
        return self.terminated or self.truncated

    def begin(self, *, task: int, seed: int, replay: np.ndarray) -> None:
        """Start over and take the actions ``replay``, float32 [k, A], which may end the episode."""
        self.env.reset(task=task, seed=seed)
        self._waiting = deque(np.zeros((draw_latency(self.latency, seed), self.env.spec.action_dim), dtype=np.float32))
        self.elapsed = 0
        self.terminated = self.truncated = self.success = False
        for action in replay:
            self.step(action)

    def step(self, action: np.ndarray) -> float:
        """The reward of one control step; 0 where the episode stands."""
        if self.standing:
            return 0.0
        self._waiting.append(action)
        outcome = self.env.step(self._waiting.popleft())
        self.elapsed += 1
        self.success = self.success or outcome.success
        self.terminated = outcome.terminated or outcome.success
        out_of_time = outcome.truncated or self.elapsed >= self.env.spec.max_steps
        self.truncated = out_of_time and not self.terminated
        return outcome.reward
