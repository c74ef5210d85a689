"""A mobile base as joints of the robot file: where it is and how fast, from odometry and to a velocity command.

Three joints (x [m], y [m], yaw [rad], of the odometry frame) for a base that drives in every direction; two (distance
along its path [m], yaw [rad]) for one that does not drive sideways.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import atan2, cos, isfinite, nan, pi, remainder, sin

HOLONOMIC, DIFFERENTIAL = ("m", "m", "rad"), ("m", "rad")


def check_base(names: Sequence[str], units: Sequence[str]) -> None:
    """ValueError unless the joints are those of a base."""
    if tuple(units) not in (HOLONOMIC, DIFFERENTIAL):
        given = ", ".join(f"{name} [{unit}]" for name, unit in zip(names, units, strict=True))
        raise ValueError(f"a base has the joints x [m], y [m], yaw [rad], or distance [m], yaw [rad]; got {given}")


def body_velocity(positions: Sequence[float], velocities: Sequence[float]) -> tuple[float, float, float]:
    """Forwards and to the left [m/s], and turning [rad/s], in the base's own frame."""
    if len(positions) == 2:
        return velocities[0], 0.0, velocities[1]
    (x, y, turning), yaw = velocities, positions[2]
    return cos(yaw) * x + sin(yaw) * y, cos(yaw) * y - sin(yaw) * x, turning


def yaw_of(x: float, y: float, z: float, w: float) -> float:
    """Turn about the vertical axis of a quaternion [rad]."""
    return atan2(2.0 * (w * z + x * y), 1.0 - 2.0 * (y * y + z * z))


class BaseOdometry:
    """Joint positions of a base with ``joints`` (2 or 3) from the poses that odometry publishes."""

    def __init__(self, joints: int) -> None:
        self._joints, self._last = joints, (0.0, 0.0, 0.0)
        self._distance, self._begun = 0.0, False

    def positions(self, x: float, y: float, yaw: float) -> list[float]:
        """Yaw goes on beyond a whole turn. The distance is 0 at the first pose, and counted along each heading.

        NaN for a pose that is not finite, which the safety filter rejects; the next one counts from the last good one.
        """
        if not all(map(isfinite, (x, y, yaw))):
            return [nan] * self._joints
        if not self._begun:
            self._begun, self._last = True, (x, y, yaw)
        before_x, before_y, before = self._last
        yaw = before + remainder(yaw - before, 2.0 * pi)
        heading = (before + yaw) / 2.0
        self._distance += (x - before_x) * cos(heading) + (y - before_y) * sin(heading)
        self._last = x, y, yaw
        return [x, y, yaw] if self._joints == 3 else [self._distance, yaw]
