"""The end-effector position that the robot publishes (TF), to check the robot file's kinematic chain. Needs no ROS."""

from __future__ import annotations

import math
from collections.abc import Sequence

from real_robot.robot_file import Robot
from real_robot.safety.kinematics import EndEffectorPoint, Vector

MAX_DIFFERENCE_M = 0.01
Quaternion = tuple[float, float, float, float]  # x, y, z, w, of unit length, as ROS has it


class FrameTree:
    """The newest published pose of every frame in its parent's."""

    def __init__(self) -> None:
        self._parents: dict[str, tuple[str, Vector, Quaternion]] = {}

    def put(self, child: str, parent: str, xyz: Vector, quaternion: Quaternion) -> None:
        """Pose of ``child`` in ``parent``: translation [m] and rotation."""
        self._parents[child] = parent, xyz, quaternion

    def position(self, frame: str, base: str) -> Vector | None:
        """Origin of ``frame`` in ``base`` [m]; None if the published frames do not connect them."""
        point = (0.0, 0.0, 0.0)
        for _ in range(len(self._parents) + 1):
            if frame == base:
                return point
            if frame not in self._parents:
                return None
            frame, (x, y, z), quaternion = self._parents[frame]
            rotated = _rotate(quaternion, point)
            point = rotated[0] + x, rotated[1] + y, rotated[2] + z
        return None  # the frames form a circle


def _rotate(quaternion: Quaternion, point: Vector) -> Vector:
    """``point`` rotated: p + 2 w (u x p) + 2 u x (u x p), with the quaternion (u, w)."""
    x, y, z, w = quaternion
    px, py, pz = point
    cx, cy, cz = y * pz - z * py, z * px - x * pz, x * py - y * px
    return (
        px + 2 * (w * cx + y * cz - z * cy),
        py + 2 * (w * cy + z * cx - x * cz),
        pz + 2 * (w * cz + x * cy - y * cx),
    )


def check_end_effector(tree: FrameTree, robot: Robot, joints: Sequence[float]) -> None:
    """ValueError if TF and the robot file disagree about the end effector's position at the measured ``joints``."""
    box, frame, base = robot.limits.workspace, robot.ros.end_effector_frame, robot.ros.command_frame
    assert box is not None  # checked by robot_file
    published = tree.position(frame, base)
    if published is None:
        raise ValueError(f"TF has no transform from {frame} to {base}")
    computed = EndEffectorPoint(box.frames, box.end_effector, robot.limits.axes)(joints)
    if (apart := math.dist(published, computed)) > MAX_DIFFERENCE_M:
        raise ValueError(
            f"TF has {frame} {1000 * apart:.0f} mm away from the end-effector position of the robot file's chain, so "
            "the workspace box would be wrong; correct limits.workspace (chain, end_effector) or ros.end_effector_frame"
        )
