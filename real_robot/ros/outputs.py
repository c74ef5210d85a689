"""Safe commands to the controller, one class per ``ros.command_type`` of the robot file. Needs rclpy.

Every class is constructed from (node, ros section, limits); ValueError if the ROS package of its message is missing.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import Twist, TwistStamped
from rclpy.action import ActionClient
from rclpy.node import Node
from rclpy.qos import QoSProfile
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from real_robot.control.mobile_base import body_velocity
from real_robot.control.protocols import CommandSink
from real_robot.robot_file import TICKS_PER_GOAL, RosSection
from real_robot.ros.clock import offset_s
from real_robot.ros.messages import ros_type
from real_robot.safety.commands import PathPoint, SafeCommand, due_point
from real_robot.safety.kinematics import EndEffectorPoint
from real_robot.safety.limits import RobotLimits

# The message of a stop is sent so often, in case that one is lost.
URGENT_COPIES = 4
# With nothing sent for longer, the relation of the two clocks is read again.
SILENT_S = 0.25
MAX_CLOCK_STEP_S = 0.005
Motion = TypeVar("Motion", SafeCommand, PathPoint)


@runtime_checkable
class CommandOutput(CommandSink, Protocol):
    """Publishes the command of every tick. At ``halt`` a position is held, and a trajectory ends in its stop."""

    def problem(self) -> str:
        """Why commands cannot be sent safely, or ""."""
        ...

    def close(self) -> None:
        """``halt``, then nothing more is sent."""
        ...


class _TopicOutput:
    """The publisher of a command topic, on which nobody else may publish."""

    def __init__(self, node: Node, kind: Any, ros: RosSection) -> None:
        self._node, self._topic, self._frame = node, ros.command, ros.command_frame
        self._publisher = node.create_publisher(kind, ros.command, QoSProfile(depth=1))

    def problem(self) -> str:
        """Whether another node publishes commands for this arm."""
        others = self._node.count_publishers(self._topic) - 1
        return f"{others} other publishers on {self._topic}: only one node may move the arm" if others > 0 else ""

    def halt(self) -> None:
        """Nothing; outputs of velocities send zero."""

    def close(self) -> None:
        self.halt()
        self._node.destroy_publisher(self._publisher)

    def _publish_stamped(self, message: Any) -> None:
        """In the frame of commands, now: MoveIt Servo drops commands that are too old."""
        message.header.stamp = self._node.get_clock().now().to_msg()
        message.header.frame_id = self._frame
        self._publisher.publish(message)


class TrajectoryOutput(_TopicOutput):
    """JointTrajectory with absolute times that ends in the whole stop, for joint_trajectory_controller."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        super().__init__(node, JointTrajectory, ros)
        self._trajectory = TrajectoryBuilder(node, limits)

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        message = self._trajectory(path)
        for _ in range(URGENT_COPIES if out.urgent else 1):
            self._publisher.publish(message)

    def problem(self) -> str:
        return super().problem() or self._trajectory.problem()


class TrajectoryActionOutput:
    """The same as goals of a FollowJointTrajectory action: every goal replaces the one before, results are ignored.

    Goals are sent every ``TICKS_PER_GOAL`` ticks, and only while there is a server, as they would never be answered
    otherwise.
    """

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        self._type = ros_type(
            "control_msgs.action", "FollowJointTrajectory", setting="command_type: follow_joint_trajectory"
        )
        self._trajectory = TrajectoryBuilder(node, limits)
        self._node, self._topic = node, ros.command
        self._client = ActionClient(node, self._type, ros.command)
        self._ticks = 0

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        self._ticks += 1
        if (out.urgent or self._ticks % TICKS_PER_GOAL == 0) and self._client.server_is_ready():
            self._client.send_goal_async(self._type.Goal(trajectory=self._trajectory(path)))

    def problem(self) -> str:
        """Whether another client may send goals: the service of the action shows who can."""
        others = self._node.count_clients(f"{self._topic}/_action/send_goal") - 1
        problem = f"{others} other clients of {self._topic}: only one node may move the arm" if others > 0 else ""
        return problem or self._trajectory.problem()

    def halt(self) -> None:
        """Nothing: what was sent ends in a stop."""

    def close(self) -> None:
        self._client.destroy()


class PositionOutput(_TopicOutput):
    """Float64MultiArray of joint positions, for a forward_command_controller of positions."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        super().__init__(node, Float64MultiArray, ros)

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        self._publisher.publish(Float64MultiArray(data=list(out.positions)))


class VelocityOutput(_TopicOutput):
    """Float64MultiArray of joint velocities, for a forward_command_controller of velocities."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        self._rest = [0.0] * len(limits.axes)
        super().__init__(node, Float64MultiArray, ros)

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        self._publisher.publish(Float64MultiArray(data=list(out.velocities)))

    def halt(self) -> None:
        self._publisher.publish(Float64MultiArray(data=self._rest))


class JointVelocityOutput(_TopicOutput):
    """JointJog with every joint's velocity, for MoveIt Servo."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        self._names = [axis.name for axis in limits.axes]
        self._dt = 1.0 / limits.command_hz
        self._type = ros_type("control_msgs.msg", "JointJog", setting="command_type: joint_jog")
        super().__init__(node, self._type, ros)

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        self._publish(out.velocities)

    def halt(self) -> None:
        self._publish([0.0] * len(self._names))

    def _publish(self, velocities: Sequence[float]) -> None:
        self._publish_stamped(self._type(joint_names=self._names, velocities=list(velocities), duration=self._dt))


class _AnyTwistOutput(_TopicOutput):
    """``stamped``: TwistStamped in place of Twist."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits, *, stamped: bool) -> None:
        super().__init__(node, TwistStamped if stamped else Twist, ros)
        self._stamped = stamped

    def halt(self) -> None:
        self._publish(Twist())

    def _publish(self, twist: Twist) -> None:
        if self._stamped:
            self._publish_stamped(TwistStamped(twist=twist))
        else:
            self._publisher.publish(twist)


class TwistOutput(_AnyTwistOutput):
    """TwistStamped of the end effector, for MoveIt Servo; positions of joints outside of the chain to ``gripper``."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        box = limits.workspace
        assert box is not None  # checked by robot_file
        chain = {frame.joint for frame in box.frames}
        super().__init__(node, ros, limits, stamped=True)
        self._point = EndEffectorPoint(box.frames, box.end_effector, limits.axes)
        self._others = [i for i, axis in enumerate(limits.axes) if axis.name not in chain]
        self._gripper = (
            node.create_publisher(Float64MultiArray, ros.gripper, QoSProfile(depth=1)) if self._others else None
        )

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        twist = Twist()
        velocities = self._point.twist(out.positions, out.velocities)
        for vector, values in zip((twist.linear, twist.angular), velocities, strict=True):
            vector.x, vector.y, vector.z = values
        self._publish(twist)
        if self._gripper is not None:
            self._gripper.publish(Float64MultiArray(data=[out.positions[i] for i in self._others]))

    def close(self) -> None:
        super().close()
        if self._gripper is not None:
            self._node.destroy_publisher(self._gripper)


class BaseTwistOutput(_AnyTwistOutput):
    """The velocity of a mobile base, in its own frame."""

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        twist = Twist()
        twist.linear.x, twist.linear.y, twist.angular.z = body_velocity(out.positions, out.velocities)
        self._publish(twist)


class ControllerPart(NamedTuple):
    """An output and its joints (indices into every command).

    ``at_once``: it takes no times, while other controllers get their points ahead; so it is sent what is due now, and
    no path.
    """

    output: CommandOutput
    joints: Sequence[int]
    at_once: bool


class SeparateOutputs:
    """Several controllers: each gets its joints' part of every command."""

    def __init__(self, parts: Sequence[ControllerPart]) -> None:
        self._parts = parts

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        for part in self._parts:
            if part.at_once:
                _, positions, velocities, accelerations = due_point(path, time.monotonic())
                due = out._replace(
                    positions=tuple(positions), velocities=tuple(velocities), accelerations=tuple(accelerations)
                )
                part.output.send(of_joints(due, part.joints), [])
            else:
                part.output.send(of_joints(out, part.joints), [of_joints(point, part.joints) for point in path])

    def problem(self) -> str:
        return next((problem for part in self._parts if (problem := part.output.problem())), "")

    def halt(self) -> None:
        for part in self._parts:
            part.output.halt()

    def close(self) -> None:
        for part in self._parts:
            part.output.close()


class TrajectoryBuilder:
    """A JointTrajectory message from a path. Its times are on the ROS clock, which the controller reads too."""

    def __init__(self, node: Node, limits: RobotLimits) -> None:
        self._node = node
        self._names = [axis.name for axis in limits.axes]
        self._offset_s, self._sent_s = 0.0, -SILENT_S  # ROS clock less monotonic clock, when it was last used

    def __call__(self, path: Sequence[PathPoint]) -> JointTrajectory:
        now_s = time.monotonic()
        if now_s - self._sent_s >= SILENT_S:  # never in motion: one offset for all messages of a motion
            self._offset_s = self._clock_offset_s()
        self._sent_s = now_s
        first = path[0].time_s
        points = [
            JointTrajectoryPoint(
                positions=array("d", point.positions),
                velocities=array("d", point.velocities),
                accelerations=array("d", point.accelerations),
                time_from_start=Duration(**_time_fields(point.time_s - first)),
            )
            for point in path
        ]
        message = JointTrajectory(joint_names=self._names, points=points)
        message.header.stamp = Time(**_time_fields(first + self._offset_s))
        return message

    def problem(self) -> str:
        """Whether the clock was set while the arm moves."""
        step_s = self._clock_offset_s() - self._offset_s
        moving = time.monotonic() - self._sent_s < SILENT_S
        return f"the ROS clock was set by {step_s:.3f} s" if moving and abs(step_s) > MAX_CLOCK_STEP_S else ""

    def _clock_offset_s(self) -> float:
        return offset_s(lambda: float(self._node.get_clock().now().nanoseconds * 1e-9))


def of_joints(motion: Motion, joints: Sequence[int]) -> Motion:
    """The part of these joints (indices)."""

    def part(values: Sequence[float]) -> tuple[float, ...]:
        return tuple(values[i] for i in joints)

    return motion._replace(
        positions=part(motion.positions),
        velocities=part(motion.velocities),
        accelerations=part(motion.accelerations),
    )


def _time_fields(seconds: float) -> dict[str, int]:
    whole, rest = divmod(round(seconds * 1e9), 1_000_000_000)
    return {"sec": whole, "nanosec": rest}
