"""A demonstrator with one constant error, the same in every episode."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sims.tabletop.demonstrators.action_noise import ActionNoise
from sims.tabletop.demonstrators.rules import ExpertView, motion_towards, next_waypoint
from sims.tabletop.tasks.registry import all_tasks

AIM = 0.001  # [m] std of the goal error of an episode
# Error of the end-effector position [m] (left, too low) in tasks where the hand comes from above and hides the object.
OCCLUSION_ERROR = (0.0, 0.021, -0.0125)


class BiasedDemonstrator:
    """Acts by the rule of each environment's task, with errors in proportion to ``noise``.

    With ``noise`` 1 there are two errors: correlated action noise, and, where the hand comes from above and hides the
    object, a position error of 21 mm sideways and 12.5 mm upwards, so that it often fails. A policy that imitates it
    has the same error, and all that reinforcement learning has to remove is one translation.
    """

    def __init__(self, env: ExpertView, *, noise: float, seed: int) -> None:
        self._env, self._noise = env, noise
        device = env.candidate.device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        n = len(env.candidate)
        self._action_noise = ActionNoise(n, device)
        self._offset = torch.zeros(n, 3, device=device)
        self._occlusion_error = noise * torch.tensor(OCCLUSION_ERROR, device=device)

    def act(self) -> Float[Tensor, "N 7"]:
        """The next action of every environment, in [-1, 1]."""
        env = self._env
        error = torch.zeros_like(self._offset)
        for name, env_ids in env.task_envs:
            error[env_ids] = self._occlusion_error * all_tasks()[name].from_above
        waypoint = next_waypoint(env, error)
        self._draw_errors()
        motion, speed = motion_towards(env, waypoint.goal + self._offset, waypoint.yaw)
        action = torch.cat([motion, waypoint.gripper[:, None]], dim=1)
        # Fast motion is noisier than slow motion.
        return self._action_noise.apply(action, speed)

    def _draw_errors(self) -> None:
        """Advance the action noise; at the start of an episode a new goal error is sampled."""
        shape = (len(self._offset), 10)
        draw = self._noise * torch.randn(shape, generator=self._generator, device=self._offset.device)
        started = self._env.elapsed == 0
        self._action_noise.advance(draw[:, :7], started)
        self._offset = torch.where(started[:, None], AIM * draw[:, 7:], self._offset)
