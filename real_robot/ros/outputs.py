"""Safe commands to the controller, one class per ``ros.command_type`` of the robot file. Needs rclpy.

Every class is constructed from (node, ros section, limits); ValueError if the ROS package of its message is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from builtin_interfaces.msg import Duration
from geometry_msgs.msg import TwistStamped
from rclpy.action import ActionClient
from rclpy.node import Node
from rclpy.qos import QoSProfile
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from real_robot.robot_file import RosSection
from real_robot.ros.messages import ros_type
from real_robot.safety.commands import SafeCommand, StopPath
from real_robot.safety.kinematics import EndEffectorPoint
from real_robot.safety.limits import RobotLimits

# A stop path is thinned to at most this many points per trajectory; the controller's splines interpolate.
STOP_POINTS = 6


@runtime_checkable
class CommandOutput(Protocol):
    """Publishes the command of every tick."""

    def send(self, out: SafeCommand, stop_path: StopPath) -> None:
        """``stop_path``: the motion that follows if no further command arrives."""
        ...

    def close(self) -> None: ...


class TrajectoryOutput:
    """JointTrajectory that ends in the whole stop, for joint_trajectory_controller."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        self._node = node
        self._trajectory = TrajectoryBuilder(limits)
        self._publisher = node.create_publisher(JointTrajectory, ros.command, QoSProfile(depth=1))

    def send(self, out: SafeCommand, stop_path: StopPath) -> None:
        self._publisher.publish(self._trajectory(out, stop_path))

    def close(self) -> None:
        self._node.destroy_publisher(self._publisher)


class TrajectoryActionOutput:
    """The same as goals of a FollowJointTrajectory action: every goal replaces the one before, results are ignored.

    Goals are sent only while there is a server, as they would never be answered otherwise.
    """

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        self._type = ros_type(
            "control_msgs.action", "FollowJointTrajectory", setting="command_type: follow_joint_trajectory"
        )
        self._trajectory = TrajectoryBuilder(limits)
        self._client = ActionClient(node, self._type, ros.command)

    def send(self, out: SafeCommand, stop_path: StopPath) -> None:
        if self._client.server_is_ready():
            self._client.send_goal_async(self._type.Goal(trajectory=self._trajectory(out, stop_path)))

    def close(self) -> None:
        self._client.destroy()


class PositionOutput:
    """Float64MultiArray of joint positions, for forward_command_controller."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        self._node = node
        self._publisher = node.create_publisher(Float64MultiArray, ros.command, QoSProfile(depth=1))

    def send(self, out: SafeCommand, stop_path: StopPath) -> None:
        self._publisher.publish(Float64MultiArray(data=list(out.positions)))

    def close(self) -> None:
        self._node.destroy_publisher(self._publisher)


class JointVelocityOutput:
    """JointJog with every joint's velocity, for MoveIt Servo."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        self._node, self._frame = node, ros.command_frame
        self._names = [axis.name for axis in limits.axes]
        self._dt = 1.0 / limits.command_hz
        self._type = ros_type("control_msgs.msg", "JointJog", setting="command_type: joint_jog")
        self._publisher = node.create_publisher(self._type, ros.command, QoSProfile(depth=1))

    def send(self, out: SafeCommand, stop_path: StopPath) -> None:
        message: Any = self._type(joint_names=self._names, velocities=list(out.velocities))
        message.duration = self._dt
        message.header.stamp = self._node.get_clock().now().to_msg()  # Servo drops commands that are too old
        message.header.frame_id = self._frame
        self._publisher.publish(message)

    def close(self) -> None:
        self._node.destroy_publisher(self._publisher)


class TwistOutput:
    """TwistStamped of the end effector, for MoveIt Servo; positions of joints outside of the chain to ``gripper``."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        box = limits.workspace
        assert box is not None  # checked by robot_file
        chain = {frame.joint for frame in box.frames}
        self._node, self._frame = node, ros.command_frame
        self._point = EndEffectorPoint(box.frames, box.end_effector, limits.axes)
        self._publisher = node.create_publisher(TwistStamped, ros.command, QoSProfile(depth=1))
        self._others = [i for i, axis in enumerate(limits.axes) if axis.name not in chain]
        self._gripper = (
            node.create_publisher(Float64MultiArray, ros.gripper, QoSProfile(depth=1)) if self._others else None
        )

    def send(self, out: SafeCommand, stop_path: StopPath) -> None:
        message = TwistStamped()
        message.header.stamp = self._node.get_clock().now().to_msg()
        message.header.frame_id = self._frame
        velocities = self._point.twist(out.positions, out.velocities)
        for vector, values in zip((message.twist.linear, message.twist.angular), velocities, strict=True):
            vector.x, vector.y, vector.z = values
        self._publisher.publish(message)
        if self._gripper is not None:
            self._gripper.publish(Float64MultiArray(data=[out.positions[i] for i in self._others]))

    def close(self) -> None:
        self._node.destroy_publisher(self._publisher)
        if self._gripper is not None:
            self._node.destroy_publisher(self._gripper)


class TrajectoryBuilder:
    """The next point and the stop that follows it as a JointTrajectory message."""

    def __init__(self, limits: RobotLimits) -> None:
        self._names = [axis.name for axis in limits.axes]
        self._dt = 1.0 / limits.command_hz

    def __call__(self, out: SafeCommand, stop_path: StopPath) -> JointTrajectory:
        points = [_point(out.positions, out.velocities, self._dt)]
        every = max(1, -(-len(stop_path) // STOP_POINTS))
        last = len(stop_path) - 1
        for i, (positions, velocities) in enumerate(stop_path):
            if i == last or (i + 1) % every == 0:
                points.append(_point(positions, velocities, (i + 2) * self._dt))
        # header stamp zero: "start on arrival", so the controller's clock need not agree with ours
        return JointTrajectory(joint_names=self._names, points=points)


def _point(positions: Sequence[float], velocities: Sequence[float], after_s: float) -> JointTrajectoryPoint:
    seconds, rest = divmod(round(after_s * 1e9), 1_000_000_000)
    return JointTrajectoryPoint(
        positions=list(positions),
        velocities=list(velocities),
        time_from_start=Duration(sec=seconds, nanosec=rest),
    )
