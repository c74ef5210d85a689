"""A user's own Gymnasium environment: nested observations, an asymmetric action box, registered on import."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from sims.adapters.gymnasium import GymnasiumConfig
from sims.errors import UserError


class PointMaze(gymnasium.Env):
    metadata = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012

    def __init__(self, render_mode: str | None = None, *, integers: bool = False) -> None:
        self.render_mode = render_mode
        box = spaces.Box(-10.0, 10.0, (2,), np.float64)
        self.observation_space = spaces.Dict(
            {"robot": spaces.Dict({"position": box}), "goal": box, "camera": spaces.Box(0, 255, (6, 8, 3), np.uint8)}
        )
        self.action_space = spaces.Box(0, 3, (2,), np.int64) if integers else spaces.Box(-0.1, 0.3, (2,), np.float32)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[dict, dict]:
        super().reset(seed=seed)
        self.position, self.goal = self.np_random.uniform(-1, 0, 2), self.np_random.uniform(3, 4, 2)
        self.elapsed = 0
        return self._observation(), {}

    def step(self, action: np.ndarray) -> tuple[dict, float, bool, bool, dict]:
        self.position = self.position + action
        self.elapsed += 1
        distance = float(np.linalg.norm(self.position - self.goal))
        near = distance < 0.2
        return self._observation(), -distance, near, False, {"is_success": near, "distance": distance}

    def render(self) -> np.ndarray:
        return np.full((6, 8, 3), (self.elapsed, 0, 255), dtype=np.uint8)

    def _observation(self) -> dict[str, Any]:
        return {"robot": {"position": self.position.copy()}, "goal": self.goal.copy(), "camera": self.render()}


gymnasium.register(id="PointMaze-v0", entry_point=PointMaze, max_episode_steps=30)


def walk(env: PointMaze, observation: dict[str, Any]) -> np.ndarray:
    """An expert: straight to the goal."""
    return np.clip(observation["goal"] - observation["robot"]["position"], -0.1, 0.3)


@dataclass(frozen=True, kw_only=True)
class MazesConfig(GymnasiumConfig):
    """A benchmark of suites, of which "short" has two starts and "broken" cannot be made."""

    suite: str = "whole"

    def evaluation_starts(self, num_tasks: int, episodes: int | None) -> list[tuple[int, int]]:
        if self.suite == "short" and (episodes or 0) > 2:
            raise UserError("short has two starts")
        return [(0, seed) for seed in range(episodes or 2)]

    def under_protocol(self, name: str) -> MazesConfig:
        return self

    def evaluation_suites(self, names: Sequence[str]) -> tuple[MazesConfig, ...]:
        return tuple(replace(self, suite=name, id=self.id + "0" * (name == "broken")) for name in names)

    def score_table(self, success: Mapping[str, float]) -> str:
        return str(dict(success))
