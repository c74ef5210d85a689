"""The point environment with the goal in the state and no cameras, for policies that read the state alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from sims.vector_env import Observation, Step
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


class CorrectedReach(ReachEnv):
    """``person``: in each environment, 1 or -1 where one acts instead of the policy, to or from the goal; 0: nobody."""

    def __init__(self, *, person: Sequence[int], max_steps: int = 40) -> None:
        super().__init__(num_envs=len(person), max_steps=max_steps)
        self.person = torch.tensor(person)

    def step(self, action: Tensor) -> Step:
        running, person = ~self.finished, self.person[:, None]
        goal = self.squares[self.envs, self.task] - self.point
        step = super().step(torch.where(person == 0, action, (person * goal * 10).clamp(-1, 1)))
        return dataclasses.replace(step, intervened=running & (self.person != 0))
