"""ros2_control's joint_trajectory_controller as far as motion is concerned. Needs no ROS.

After ``joint_trajectory_controller/src/trajectory.cpp`` (``Trajectory::sample``, ``interpolate_between_points``): a new
trajectory replaces the old one and begins at its stamp, or on arrival if that is zero. Before its first point it is
approached from the present state; between two points cubic splines go through positions and velocities, quintic ones
through accelerations too; the last point is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def cubic(begin: Floats, end: Floats, t: Floats | float, length: Floats | float) -> Floats:
    """State [..., 3, J] (position, velocity, acceleration) ``t`` [s] after ``begin`` of the cubic through both ends'
    positions and velocities, ``length`` [s] apart."""
    p, v = begin[..., 0, :], begin[..., 1, :]
    gap, w = end[..., 0, :] - p, end[..., 1, :]
    c2 = (3.0 * gap / length - 2.0 * v - w) / length
    c3 = (-2.0 * gap / length + v + w) / length**2
    position = p + t * (v + t * (c2 + t * c3))
    return np.stack([position, v + t * (2.0 * c2 + 3.0 * t * c3), 2.0 * c2 + 6.0 * t * c3], axis=-2)


def quintic(begin: Floats, end: Floats, t: Floats | float, length: Floats | float) -> Floats:
    """The same through both ends' positions, velocities and accelerations."""
    p, v, a = (begin[..., i, :] for i in range(3))
    gap, w, b = end[..., 0, :] - p, end[..., 1, :], end[..., 2, :]
    h = length
    c3 = (20.0 * gap - (8.0 * w + 12.0 * v) * h - (3.0 * a - b) * h**2) / (2.0 * h**3)
    c4 = (-30.0 * gap + (14.0 * w + 16.0 * v) * h + (3.0 * a - 2.0 * b) * h**2) / (2.0 * h**4)
    c5 = (12.0 * gap - 6.0 * (w + v) * h + (b - a) * h**2) / (2.0 * h**5)
    position = p + t * (v + t * (0.5 * a + t * (c3 + t * (c4 + t * c5))))
    velocity = v + t * (a + t * (3.0 * c3 + t * (4.0 * c4 + t * 5.0 * c5)))
    acceleration = a + t * (6.0 * c3 + t * (12.0 * c4 + t * 20.0 * c5))
    return np.stack([position, velocity, acceleration], axis=-2)


class Trajectory:
    """The controller's present trajectory. Times [s] of the controller's clock, states [..., 3, J]."""

    def __init__(self, positions: Floats, now_s: float) -> None:
        still = np.zeros_like(positions)
        self._before_s, self._before = now_s, np.stack([positions, still, still])
        self._times, self._states = np.array([now_s]), self._before[None]
        self._spline = quintic

    def follow(
        self,
        times: Sequence[float],
        positions: Floats,
        velocities: Floats,
        accelerations: Floats | None,
        now_s: float,
    ) -> None:
        """Replace the trajectory by points at ``times``, [T, J] each."""
        self._before, self._before_s = self.sample(now_s), now_s
        self._spline = cubic if accelerations is None else quintic
        rates = np.zeros_like(positions) if accelerations is None else accelerations
        self._times, self._states = np.asarray(times), np.stack([positions, velocities, rates], axis=1)

    def sample(self, now_s: float) -> Floats:
        """Position, velocity and acceleration of every joint at ``now_s``, [3, J]."""
        k = int(np.searchsorted(self._times, now_s, side="right"))
        if k == len(self._times):
            last = self._states[-1].copy()
            last[1:] = 0.0
            return last
        begin, begin_s = (self._states[k - 1], self._times[k - 1]) if k else (self._before, self._before_s)
        return self._spline(begin, self._states[k], now_s - begin_s, max(self._times[k] - begin_s, 1e-9))
