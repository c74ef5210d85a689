"""The end-effector position by TF's quaternions compared with the robot file's kinematic chain."""

from __future__ import annotations

import dataclasses
from math import cos, sin
from pathlib import Path

import numpy as np
import pytest

from real_robot.robot_file import Robot, load_robot
from real_robot.ros.frames import FrameTree, Quaternion, check_end_effector
from real_robot.safety.kinematics import EndEffectorPoint, JointFrame

ROBOTS = Path(__file__).parents[2] / "configs" / "robots"


def product(p: Quaternion, q: Quaternion) -> Quaternion:
    (px, py, pz, pw), (qx, qy, qz, qw) = p, q
    return (
        pw * qx + px * qw + py * qz - pz * qy,
        pw * qy - px * qz + py * qw + pz * qx,
        pw * qz + px * qy - py * qx + pz * qw,
        pw * qw - px * qx - py * qy - pz * qz,
    )


def turned(frame: JointFrame, angle: float) -> Quaternion:
    """The joint frame's fixed rotation, then ``angle`` about its own z axis."""
    roll, pitch, yaw = (0.5 * part for part in frame.rpy)
    fixed = product(
        product((0.0, 0.0, sin(yaw), cos(yaw)), (0.0, sin(pitch), 0.0, cos(pitch))), (sin(roll), 0.0, 0.0, cos(roll))
    )
    return product(fixed, (0.0, 0.0, sin(0.5 * angle), cos(0.5 * angle)))


def robot_with_frames(name: str) -> Robot:
    robot = load_robot(ROBOTS / f"{name}.yaml")
    return dataclasses.replace(
        robot, ros=dataclasses.replace(robot.ros, end_effector_frame="tool", command_frame="base")
    )


def published(robot: Robot, joints: list[float]) -> FrameTree:
    """As published by robot_state_publisher: one link per joint, then the end effector."""
    box, tree, parent = robot.limits.workspace, FrameTree(), "base"
    assert box is not None
    order = [axis.name for axis in robot.limits.axes]
    for frame in box.frames:
        tree.put(f"{frame.joint}_link", parent, frame.xyz, turned(frame, joints[order.index(frame.joint)]))
        parent = f"{frame.joint}_link"
    tree.put("tool", parent, box.end_effector, (0.0, 0.0, 0.0, 1.0))
    return tree


@pytest.mark.parametrize("name", ["franka_panda", "ur5e"])
def test_the_published_position_agrees_with_the_kinematic_chain(name: str) -> None:
    robot = robot_with_frames(name)
    box = robot.limits.workspace
    assert box is not None
    point = EndEffectorPoint(box.frames, box.end_effector, robot.limits.axes)
    rng = np.random.default_rng(0)
    for _ in range(10):
        joints = rng.uniform(-1.5, 1.5, len(robot.limits.axes)).tolist()
        tree = published(robot, joints)
        np.testing.assert_allclose(tree.position("tool", "base"), point(joints), atol=1e-9)
        check_end_effector(tree, robot, joints)


def test_another_end_effector_than_the_files_is_refused() -> None:
    robot = robot_with_frames("franka_panda")
    joints = [0.1 * i for i in range(len(robot.limits.axes))]
    tree = published(robot, joints)
    tree.put("tool", "panda_joint7_link", (0.0, 0.0, 0.05), (0.0, 0.0, 0.0, 1.0))
    with pytest.raises(ValueError, match=r"TF has tool \d+ mm away"):
        check_end_effector(tree, robot, joints)


def test_frames_that_are_not_connected() -> None:
    tree = FrameTree()
    assert tree.position("base", "base") == (0.0, 0.0, 0.0)
    assert tree.position("tool", "base") is None
    tree.put("tool", "hand", (0.0, 0.0, 0.1), (0.0, 0.0, 0.0, 1.0))
    tree.put("hand", "tool", (0.0, 0.0, 0.1), (0.0, 0.0, 0.0, 1.0))
    assert tree.position("tool", "base") is None
    with pytest.raises(ValueError, match="TF has no transform from tool to base"):
        check_end_effector(tree, robot_with_frames("ur5e"), [0.0] * 6)
