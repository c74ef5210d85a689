"""Time limit, success and restoring of states, for any SingleEnv."""

from __future__ import annotations

from collections import deque

import numpy as np

from sims.subproc.latency import Latency, draw_latency
from sims.subproc.single_env import SingleEnv


class ReplayableEpisode:
    """One episode; steps after its end change nothing.

    A state is restored by replaying its actions from the start. This is exact in every deterministic simulator, whereas
    writing positions and velocities would lose the solver's warm start, contacts and internal clocks.
    """

    def __init__(self, env: SingleEnv, latency: Latency) -> None:
        self.env, self.latency = env, latency
        self._delayed: deque[np.ndarray] = deque()  # actions that have no effect yet, because of the latency
        self.elapsed = 0
        self.terminated = self.truncated = self.success = False

    @property
    def finished(self) -> bool:
        return self.terminated or self.truncated

    def begin(self, *, task: int, seed: int, replay: np.ndarray) -> None:
        """Reset, then take the actions ``replay``, float32 [k, A], which may end the episode."""
        self.env.reset(task=task, seed=seed)
        self._delayed = deque(np.zeros((draw_latency(self.latency, seed), self.env.spec.action_dim), dtype=np.float32))
        self.elapsed = 0
        self.terminated = self.truncated = self.success = False
        for action in replay:
            self.step(action)

    def step(self, action: np.ndarray) -> float:
        """The reward of one control step; 0 if the episode has finished."""
        if self.finished:
            return 0.0
        self._delayed.append(action)
        result = self.env.step(self._delayed.popleft())
        self.elapsed += 1
        self.success = self.success or result.success
        self.terminated = result.terminated or result.success
        out_of_time = result.truncated or self.elapsed >= self.env.spec.max_steps
        self.truncated = out_of_time and not self.terminated
        return float(result.success) if result.reward is None else result.reward
