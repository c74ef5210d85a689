"""Forward kinematics of one point, the end effector, in plain floats so that it costs microseconds.

Joints are given as in a URDF, with the motion along or about each joint's own z axis. The point is transformed from the
last frame to the base, so no rotation matrix is multiplied with another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, sin, sqrt

import numpy as np
from numpy.typing import NDArray

from real_robot.safety.stopping import AxisLimits

Vector = tuple[float, float, float]
# From the end effector to the base: a joint's index, its lever arm [m] or 1, and 1 if travel due to the joints between
# it and the end effector adds to the lever arm, else 0.
LeverArms = list[tuple[int, float, float]]


@dataclass(frozen=True, kw_only=True)
class JointFrame:
    """Pose of a joint's frame in its parent's: translation [m], then roll, pitch, yaw [rad] about fixed axes.

    ``joint`` names the joint that turns (or, for unit m, slides) about (along) the frame's z axis.
    """

    joint: str
    xyz: Vector
    rpy: Vector = (0.0, 0.0, 0.0)


def rotation(rpy: Vector) -> tuple[float, ...]:
    """Row-major 3x3 rotation Rz(yaw) Ry(pitch) Rx(roll)."""
    (cr, cp, cy), (sr, sp, sy) = (tuple(map(f, rpy)) for f in (cos, sin))
    return (
        *(cy * cp, cy * sp * sr - sy * cr, cy * sp * cr + sy * sr),
        *(sy * cp, sy * sp * sr + cy * cr, sy * sp * cr - cy * sr),
        *(-sp, cp * sr, cp * cr),
    )


def max_travel(levers: LeverArms, sweeps: Sequence[float]) -> float:
    """Upper bound of the end effector's path length [m] while each joint moves by ``sweeps`` from (or to) ``levers``.

    A joint that moves by s moves the end effector by at most its lever arm times s. The lever arm is the end effector's
    distance from the joint's axis, plus the travel that the joints after it may have added. Sweeps are total path
    lengths [rad or m], not negative.
    """
    travel = 0.0
    for index, lever, turns in levers:
        travel += (lever + turns * travel) * sweeps[index]
    return travel


class EndEffectorPoint:
    """Position of the end effector in the base frame."""

    def __init__(self, frames: Sequence[JointFrame], offset: Vector, axes: Sequence[AxisLimits]) -> None:
        """``axes``: every joint of the robot in command order; one without a frame does not move the point.

        ``offset``: of the point in the last joint's frame [m].
        """
        order = {axis.name: i for i, axis in enumerate(axes)}
        unknown = [frame.joint for frame in frames if frame.joint not in order]
        if unknown:
            raise ValueError(f"kinematics names the joints {unknown}; the robot has {list(order)}")
        self._offset = offset
        self._chain = [
            (order[frame.joint], axes[order[frame.joint]].unit == "m", rotation(frame.rpy), frame.xyz)
            for frame in reversed(frames)
        ]

    def __call__(self, joints: Sequence[float]) -> Vector:
        """x, y, z [m] in the base frame."""
        return self.position_and_levers(joints)[0]

    def position_and_levers(self, joints: Sequence[float]) -> tuple[Vector, LeverArms]:
        """x, y, z [m] in the base frame, and every joint's lever arm: the point's distance from its axis."""
        (x, y, z), levers = self._offset, []
        for index, slides, (a, b, c, d, e, f, g, h, i), (px, py, pz) in self._chain:
            q = joints[index]
            if slides:
                z += q
                levers.append((index, 1.0, 0.0))
            else:
                levers.append((index, sqrt(x * x + y * y), 1.0))
                cq, sq = cos(q), sin(q)
                x, y = cq * x - sq * y, sq * x + cq * y
            x, y, z = a * x + b * y + c * z + px, d * x + e * y + f * z + py, g * x + h * y + i * z + pz
        return (x, y, z), levers

    def twist(self, joints: Sequence[float], speeds: Sequence[float]) -> tuple[Vector, Vector]:
        """Linear [m/s] and angular [rad/s] velocity of the end effector, in the base frame."""
        origin, turn = np.zeros(3), np.eye(3)
        motions: list[tuple[NDArray[np.float64], NDArray[np.float64], bool, float]] = []
        for index, slides, rotated, xyz in reversed(self._chain):
            origin = origin + turn @ xyz
            turn = turn @ np.reshape(rotated, (3, 3))
            axis = turn[:, 2]
            motions.append((axis, origin, slides, speeds[index]))
            q = joints[index]
            if slides:
                origin = origin + q * axis
            else:
                turn = turn @ np.array([[cos(q), -sin(q), 0.0], [sin(q), cos(q), 0.0], [0.0, 0.0, 1.0]])
        point = origin + turn @ self._offset
        linear, angular = np.zeros(3), np.zeros(3)
        for axis, joint_origin, slides, speed in motions:
            linear += speed * (axis if slides else np.cross(axis, point - joint_origin))
            angular += 0.0 if slides else speed * axis
        (x, y, z), (rx, ry, rz) = linear.tolist(), angular.tolist()
        return (x, y, z), (rx, ry, rz)
