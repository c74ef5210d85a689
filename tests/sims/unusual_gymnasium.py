"""Gymnasium environments that do what is allowed and unusual."""

from __future__ import annotations

import random
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces


class Walk(gymnasium.Env):
    """The position moves by the action; success where x > 0."""

    metadata = {"render_modes": [], "render_fps": 10}  # noqa: RUF012
    observation_space: spaces.Space = spaces.Box(-10, 10, (2,), np.float32)
    action_space = spaces.Box(-1, 1, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict]:
        super().reset(seed=seed)
        self.position, self.elapsed = self.draw(), 0
        return self.observation(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        self.position, self.elapsed = self.position + action, self.elapsed + 1
        return self.observation(), 0.0, False, False, self.info()

    def draw(self) -> np.ndarray:
        return self.np_random.uniform(-1, 0, 2)

    def observation(self) -> Any:
        return self.position.astype(np.float32)

    def info(self) -> dict:
        return {"is_success": bool(self.position[0] > 0)}


class OneFixedAction(Walk):
    """The second dimension of its actions has one value."""

    action_space = spaces.Box(np.array([-1, 0.5], np.float32), np.array([1, 0.5], np.float32))


class SuccessAtTheEnd(Walk):
    """After three steps, which ``info`` has nothing before."""

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        observed, reward, _, truncated, info = super().step(action)
        ended = self.elapsed == 3
        return observed, reward, ended, truncated, info if ended else {}


class GlobalGenerators(Walk):
    """Draws from those of NumPy and Python, as many older environments do."""

    def draw(self) -> np.ndarray:
        return np.array([np.random.uniform(-1, 0), random.uniform(-1, 0)])

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict]:
        return super().step(action + 0.1 * self.draw())


class Pixels(Walk):
    """Its observation is an image of the elapsed steps."""

    observation_space = spaces.Box(0, 255, (8, 6, 3), np.uint8)

    def observation(self) -> Any:
        return np.full((8, 6, 3), self.elapsed, dtype=np.uint8)


class Pair(Walk):
    """Its observation is a tuple."""

    observation_space = spaces.Tuple((spaces.Box(-10, 10, (2,), np.float32), spaces.Discrete(3)))

    def observation(self) -> Any:
        return self.position.astype(np.float32), 1


class DottedKeys(Walk):
    """Its names have dots, as LeRobot's have, beside a dictionary in the dictionary."""

    observation_space = spaces.Dict(
        {"robot.position": Walk.observation_space, "arm": spaces.Dict({"elapsed": spaces.Box(0, 20, (1,), np.float32)})}
    )

    def observation(self) -> Any:
        return {"robot.position": super().observation(), "arm": {"elapsed": np.array([self.elapsed], np.float32)}}


def forward(env: OneFixedAction, observation: np.ndarray) -> np.ndarray:
    return np.array([1.0, 0.5])


for environment in (OneFixedAction, SuccessAtTheEnd, GlobalGenerators, Pixels, Pair, DottedKeys):
    gymnasium.register(id=f"{environment.__name__}-v0", entry_point=environment, max_episode_steps=20)
