"""The point environment with the goal in the state and no cameras, for policies that read the state alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from sims.vector_env import Observation
from tests.worlds import PointEnv


class ReachEnv(PointEnv):
    """state = [position, vector to the goal]."""

    def __init__(self, *, num_envs: int, max_steps: int = 40) -> None:
        super().__init__(num_envs=num_envs, max_steps=max_steps)
        self.spec = dataclasses.replace(self.spec, name="reach", state_dim=4, cameras=())

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        obs = super().observe(env_ids)
        index = torch.arange(self.spec.num_envs) if env_ids is None else torch.tensor(env_ids)
        goal = self.squares[index, self.task[index]] - obs.state
        return dataclasses.replace(obs, images=obs.images[:, :0], state=torch.cat([obs.state, goal], dim=1))
