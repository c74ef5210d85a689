"""Where the robot itself says its tool is (TF), to hold the robot file's kinematic chain against."""

from __future__ import annotations

import math
from collections.abc import Sequence

from real_robot.robot_file import Robot
from real_robot.safety.kinematics import ToolPoint, Vector

AGREEMENT_M = 0.01
Quaternion = tuple[float, float, float, float]  # x, y, z, w, of unit length, as ROS has it


class FrameTree:
    """The newest published pose of every frame in its parent's."""

    def __init__(self) -> None:
        self._parents: dict[str, tuple[str, Vector, Quaternion]] = {}

    def put(self, child: str, parent: str, xyz: Vector, quaternion: Quaternion) -> None:
        self._parents[child] = parent, xyz, quaternion

    def place(self, frame: str, base: str) -> Vector | None:
        """Origin of ``frame`` in ``base`` [m]; None if nothing published leads from one to the other."""
        point = (0.0, 0.0, 0.0)
        for _ in range(len(self._parents) + 1):
            if frame == base:
                return point
            if frame not in self._parents:
                return None
            frame, (x, y, z), quaternion = self._parents[frame]
            turned = _turn(quaternion, point)
            point = turned[0] + x, turned[1] + y, turned[2] + z
        return None  # in a circle


def _turn(quaternion: Quaternion, point: Vector) -> Vector:
    """p + 2 w (u x p) + 2 u x (u x p), with the quaternion (u, w)."""
    x, y, z, w = quaternion
    px, py, pz = point
    cx, cy, cz = y * pz - z * py, z * px - x * pz, x * py - y * px
    return (
        px + 2 * (w * cx + y * cz - z * cy),
        py + 2 * (w * cy + z * cx - x * cz),
        pz + 2 * (w * cz + x * cy - y * cx),
    )


def check_tool(tree: FrameTree, robot: Robot, joints: Sequence[float]) -> None:
    """ValueError if TF and the robot file disagree about where the tool is with ``joints`` as measured now."""
    box, frame, base = robot.limits.workspace, robot.ros.tool_frame, robot.ros.command_frame
    assert box is not None  # robot_file sees to it
    published = tree.place(frame, base)
    if published is None:
        raise ValueError(f"TF does not say where {frame} is in {base}")
    computed = ToolPoint(box.frames, box.tool, robot.limits.axes)(joints)
    if (apart := math.dist(published, computed)) > AGREEMENT_M:
        raise ValueError(
            f"TF has {frame} {1000 * apart:.0f} mm away from where the robot file's chain puts the tool, so the "
            "workspace box would guard another place; mend limits.workspace (chain, tool) or ros.tool_frame"
        )
