"""Comparison of TF with the robot file. Needs rclpy and tf2_msgs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from geometry_msgs.msg import TransformStamped
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile

from real_robot.robot_file import Robot
from real_robot.ros.frames import FrameTree, check_end_effector
from real_robot.ros.inputs import JointInput
from real_robot.ros.messages import ros_type


class FrameInput:
    """Frames from /tf and /tf_static until ``check`` has passed; they wake the executor, so not while the arm moves."""

    def __init__(self, node: Node) -> None:
        kind = ros_type("tf2_msgs.msg", "TFMessage", setting="end_effector_frame")
        self._tree, self._node = FrameTree(), node
        latched = QoSProfile(depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._subscriptions = [
            node.create_subscription(kind, topic, self._on_transforms, qos)
            for topic, qos in (("/tf", QoSProfile(depth=100)), ("/tf_static", latched))
        ]

    def check(self, robot: Robot, joints: JointInput) -> None:
        """Compare TF with the robot file, once. ValueError says what is missing or disagrees."""
        if not self._subscriptions:
            return
        measured = joints.measure()
        if measured is None:
            raise ValueError(joints.problem)
        check_end_effector(self._tree, robot, measured.positions)
        self.close()

    def close(self) -> None:
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []

    def _on_transforms(self, message: Any) -> None:
        add_transforms(self._tree, message.transforms)


def add_transforms(tree: FrameTree, transforms: Sequence[TransformStamped]) -> None:
    """Put published transforms into ``tree``."""
    for stamped in transforms:
        xyz, quaternion = stamped.transform.translation, stamped.transform.rotation
        tree.put(
            stamped.child_frame_id,
            stamped.header.frame_id,
            (xyz.x, xyz.y, xyz.z),
            (quaternion.x, quaternion.y, quaternion.z, quaternion.w),
        )
