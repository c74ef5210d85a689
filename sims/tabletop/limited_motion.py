"""Set points that follow moving targets within limits of speed and acceleration, as a real arm's safety filter does.

The law is that of ``real_robot.safety.stopping.Axis.toward`` at 100 Hz, without its limit of jerk, which the makers of
arms set so high that the acceleration changes within a tick.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from sims.tabletop.kinematics import JOINT_SPEED
from sims.tabletop.scene import LAG_S, SUBSTEPS, TIMESTEP

# Franka Emika Panda (the maker's table of joint limits) and the simulated hand, as in configs/robots/fake_arm.yaml
ACCELERATION = (15.0, 7.5, 10.0, 12.5, 15.0, 20.0, 20.0, 8.0)  # [rad/s^2], finger [m/s^2]
FINGER_SPEED = 0.4  # [m/s]
FOLLOWED = 0.25  # share of the targets' speed that is followed, as in the filter
SUBSTEPS_PER_TICK = 2
TICKS = SUBSTEPS // SUBSTEPS_PER_TICK  # of a control step
TICK_S = TIMESTEP * SUBSTEPS_PER_TICK
JOINTS = len(ACCELERATION)


class LimitedMotion:
    """Seven joints and one finger of N arms. ``state`` [N, 3, 8], rad or m: where they are sent, how fast (per tick),
    and the last target."""

    def __init__(self, num_envs: int, device: torch.device) -> None:
        speed = torch.tensor((*JOINT_SPEED, FINGER_SPEED), device=device)
        self._max_speed = TICK_S * speed
        self._max_accel = TICK_S**2 * torch.tensor(ACCELERATION, device=device)
        self._lag = torch.tensor([LAG_S / TICK_S] * 7 + [0.0], device=device)  # the servos of the fingers have none
        self._parts = (torch.arange(1, SUBSTEPS_PER_TICK + 1, device=device) / SUBSTEPS_PER_TICK)[None, :, None]
        self.state = torch.zeros(num_envs, 3, JOINTS, device=device)

    def start(self, env_ids: Sequence[int], positions: Float[Tensor, "n 8"]) -> None:
        """At rest at ``positions``."""
        self.state[env_ids] = torch.stack([positions, torch.zeros_like(positions), positions], dim=1)

    def follow(self, running: Bool[Tensor, " N"], end: Float[Tensor, "N 8"]) -> Float[Tensor, "N substeps 8"]:
        """Servo set points of one control step in which the targets move evenly from the last ones to ``end``."""
        position, speed, start = self.state.unbind(1)
        per_tick = (end - start) / TICKS
        followed = FOLLOWED * per_tick
        sent = []
        for tick in range(1, TICKS + 1):
            accel = self._toward(start + tick * per_tick - followed - position, followed, speed)
            moved = position[:, None] + self._parts * (speed[:, None] + 0.5 * self._parts * accel[:, None])
            sent.append(moved + self._lag * (speed[:, None] + self._parts * accel[:, None]))
            position, speed = position + speed + 0.5 * accel, speed + accel
        self.state = torch.where(running[:, None, None], torch.stack([position, speed, end], dim=1), self.state)
        return torch.cat(sent, dim=1)

    def _toward(
        self, gap: Float[Tensor, "N 8"], target_speed: Float[Tensor, "N 8"], speed: Float[Tensor, "N 8"]
    ) -> Float[Tensor, "N 8"]:
        """Acceleration of the next tick: the closing speed is a quarter of the gap per tick, or what half of the
        acceleration can still stop."""
        separation = gap.abs()
        closing = torch.minimum(0.25 * separation, (self._max_accel * separation).sqrt())
        wanted = (target_speed + closing.copysign(gap)).clamp(-self._max_speed, self._max_speed)
        return (wanted - speed).clamp(-self._max_accel, self._max_accel)
