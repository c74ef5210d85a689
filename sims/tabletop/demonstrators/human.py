"""A demonstrator whose errors are those of a person and are drawn anew in every episode."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from sims.tabletop.demonstrators.action_noise import ActionNoise
from sims.tabletop.demonstrators.rules import ExpertView, motion_towards, next_waypoint

POSITION_ERROR = 0.012  # [m] std per axis of the error of the perceived end-effector position, drawn per episode
MAX_DELAY = 5  # longest delay of the gripper in control steps, drawn per episode
PAUSE_PROBABILITY, MAX_PAUSE = 0.03, 6  # of a pause per control step, and its longest duration in control steps


class HumanDemonstrator:
    """Acts by the rule of each environment's task, with errors in proportion to ``noise``.

    With ``noise`` 1 it perceives the end effector displaced by a draw of 12 mm std along each axis, its gripper acts up
    to 5 control steps late, it pauses, and its actions have correlated noise. Its errors average out over episodes, so
    a policy can learn from many demonstrations what none of them shows.
    """

    def __init__(self, env: ExpertView, *, noise: float, seed: int) -> None:
        self._env, self._noise = env, noise
        device = env.candidate.device
        self._generator = torch.Generator(device=device).manual_seed(seed)
        n = len(env.candidate)
        self._action_noise = ActionNoise(n, device)
        self._error = torch.zeros(n, 3, device=device)
        self._delay = torch.zeros(n, dtype=torch.int64, device=device)
        self._commands = torch.zeros(n, MAX_DELAY + 1, device=device)  # of the gripper, newest first
        self._pause = torch.zeros(n, device=device)  # control steps for which the arm still does not move

    def act(self) -> Float[Tensor, "N 7"]:
        """The next action of every environment, in [-1, 1]."""
        self._draw_errors()
        waypoint = next_waypoint(self._env, self._error)
        motion, speed = motion_towards(self._env, waypoint.goal, waypoint.yaw)
        moves = (self._pause <= 0)[:, None]
        action = torch.cat([motion * moves, self._delayed(waypoint.gripper)[:, None]], dim=1)
        # Fast motion is noisier than slow motion.
        return self._action_noise.apply(action, speed * moves)

    def _delayed(self, gripper: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
        """The gripper command of ``_delay`` control steps ago."""
        started = (self._env.elapsed == 0)[:, None]
        commands = torch.cat([gripper[:, None], self._commands[:, :-1]], dim=1)
        self._commands = torch.where(started, gripper[:, None], commands)
        return self._commands.gather(1, self._delay[:, None])[:, 0]

    def _draw_errors(self) -> None:
        """Advance action noise and pauses; at the start of an episode its errors are drawn."""
        n, device = len(self._error), self._error.device
        normal = self._noise * torch.randn((n, 10), generator=self._generator, device=device)
        uniform = torch.rand((n, 3), generator=self._generator, device=device)
        started = self._env.elapsed == 0
        self._action_noise.advance(normal[:, :7], started)
        self._error = torch.where(started[:, None], POSITION_ERROR * normal[:, 7:], self._error)
        delay = (uniform[:, 0] * min(self._noise, 1.0) * (MAX_DELAY + 1)).long()
        self._delay = torch.where(started, delay, self._delay)
        begins = (self._pause <= 0) & ~started & (uniform[:, 1] < PAUSE_PROBABILITY * self._noise)
        self._pause = torch.where(begins, 1 + MAX_PAUSE * uniform[:, 2], (self._pause - 1) * ~started)
