"""Where the tool is: forward kinematics of one point, in plain floats so that it costs microseconds.

Joints are given as in a URDF, with the motion along or about each joint's own z axis. The tool point is carried from
the tool to the base, so no rotation matrix is ever multiplied with another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import cos, sin, sqrt

import numpy as np
from numpy.typing import NDArray

from real_robot.safety.stopping import AxisLimits

Vector = tuple[float, float, float]
# From the tool to the base: a joint's index, its lever [m] or 1, and whether what joints before it moved adds to that.
Levers = list[tuple[int, float, float]]


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


def longest_way(levers: Levers, sweeps: Sequence[float]) -> float:
    """The longest way [m] of the tool while each joint moves by ``sweeps``, to or from where it has ``levers``.

    A joint that moves by s moves the tool by its lever times s at most. Its lever is the tool's distance from the
    joint's axis, plus what the joints beyond it may have added to that. Sweeps are total ways, not negative.
    """
    way = 0.0
    for index, lever, turns in levers:
        way += (lever + turns * way) * sweeps[index]
    return way


class ToolPoint:
    """Position of the tool point in the base frame."""

    def __init__(self, frames: Sequence[JointFrame], tool: Vector, axes: Sequence[AxisLimits]) -> None:
        """``axes``: every joint of the robot in command order; one without a frame does not move the tool point."""
        order = {axis.name: i for i, axis in enumerate(axes)}
        unknown = [frame.joint for frame in frames if frame.joint not in order]
        if unknown:
            raise ValueError(f"kinematics names the joints {unknown}; the robot has {list(order)}")
        self._tool = tool
        self._chain = [
            (order[frame.joint], axes[order[frame.joint]].unit == "m", rotation(frame.rpy), frame.xyz)
            for frame in reversed(frames)
        ]

    def __call__(self, joints: Sequence[float]) -> Vector:
        """x, y, z [m] in the base frame."""
        return self.place(joints)[0]

    def place(self, joints: Sequence[float]) -> tuple[Vector, Levers]:
        """x, y, z [m] in the base frame, and every joint's lever there: how far the tool is from its axis."""
        (x, y, z), levers = self._tool, []
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
        """Linear [m/s] and angular [rad/s] velocity of the tool point, in the base frame."""
        place, turn = np.zeros(3), np.eye(3)
        moves: list[tuple[NDArray[np.float64], NDArray[np.float64], bool, float]] = []
        for index, slides, rotated, xyz in reversed(self._chain):
            place = place + turn @ xyz
            turn = turn @ np.reshape(rotated, (3, 3))
            axis = turn[:, 2]
            moves.append((axis, place, slides, speeds[index]))
            q = joints[index]
            if slides:
                place = place + q * axis
            else:
                turn = turn @ np.array([[cos(q), -sin(q), 0.0], [sin(q), cos(q), 0.0], [0.0, 0.0, 1.0]])
        tool = place + turn @ self._tool
        linear, angular = np.zeros(3), np.zeros(3)
        for axis, where, slides, speed in moves:
            linear += speed * (axis if slides else np.cross(axis, tool - where))
            angular += 0.0 if slides else speed * axis
        (x, y, z), (rx, ry, rz) = linear.tolist(), angular.tolist()
        return (x, y, z), (rx, ry, rz)
