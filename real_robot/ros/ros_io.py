"""Between ROS messages and plain numbers. Imported only where rclpy is.

Subscriptions are polled: the middleware keeps the newest message, and whoever wants it takes it. No executor wakes up
for 500 joint states a second or copies images that nobody looks at, so neither a fast sensor nor a flood on a topic
costs the control loop its punctuality.
"""

from __future__ import annotations

import importlib
import io
import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from builtin_interfaces.msg import Duration, Time
from geometry_msgs.msg import TransformStamped, TwistStamped
from numpy.typing import NDArray
from rclpy.action import ActionClient
from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from real_robot.images import fit_image
from real_robot.robot_file import Robot, RosSection
from real_robot.ros.frames import FrameTree, check_tool
from real_robot.safety.filter import Measurement, RobotLimits, SafeCommand
from real_robot.safety.kinematics import ToolPoint

SENSOR_QOS = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
LATCHED_QOS = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
# A stop path is thinned to at most this many points per trajectory; the controller's splines fill in the rest.
STOP_POINTS = 6
# External torques older than this are no proof that nothing is touched [s].
RESIDUAL_AGE_S = 0.1
REORDERED_NS = 1_000_000_000
StopPath = Sequence[tuple[Sequence[float], Sequence[float]]]  # positions and velocities of the coming ticks


class _Polled(CallbackGroup):
    """A group whose members no executor may run."""

    def can_execute(self, entity: Any) -> bool:
        return False

    def beginning_execution(self, entity: Any) -> bool:
        return False

    def ending_execution(self, entity: Any) -> None:
        raise RuntimeError("a polled subscription was executed")


class Newest:
    """The last message of a topic and when it was first seen here [s, monotonic]."""

    def __init__(self, node: Node, kind: type, topic: str) -> None:
        self._node, self.topic = node, topic
        self._subscription = node.create_subscription(kind, topic, self._never, SENSOR_QOS, callback_group=_Polled())
        self._last: tuple[Any, float] | None = None

    def take(self) -> tuple[Any, float] | None:
        """(message, when), or None before the first."""
        handle = self._subscription.handle
        with handle:
            taken = handle.take_message(self._subscription.msg_type, False)
        if taken is not None:
            self._last = taken[0], time.monotonic()
        return self._last

    def close(self) -> None:
        self._node.destroy_subscription(self._subscription)

    def _never(self, message: Any) -> None:
        raise RuntimeError(f"{self.topic} is polled")


class JointInput:
    """Joint measurements by name, never by position in the message."""

    def __init__(self, node: Node, ros: RosSection, names: Sequence[str]) -> None:
        self._node, self._names = node, list(names)
        self._states = Newest(node, JointState, ros.joint_states)
        self._residuals = Newest(node, JointState, ros.residuals) if ros.residuals else None
        self._last: tuple[int, Measurement] | None = None  # header stamp [ns], what it said
        self.trouble = f"nothing received on {ros.joint_states}"

    def measure(self) -> Measurement | None:
        """The newest measurement, stamped on the monotonic clock by the older of header and receipt.

        A message whose header is a little older than the last one's was reordered on the way and is not used; if it
        is much older, the arm's clock was set.
        """
        taken = self._states.take()
        if taken is None:
            return None
        message, received_s = taken
        stamp_ns = nanoseconds(message.header.stamp)
        if self._last is not None and 0 < self._last[0] - stamp_ns < REORDERED_NS:
            self.trouble = "joint states arrive out of order"
            return self._last[1]
        positions = _by_name(message, message.position, self._names)
        if positions is None:
            missing = [name for name in self._names if name not in message.name]
            self.trouble = (
                f"joint states lack {missing}" if missing else "joint states without a position for each name"
            )
            return None
        self.trouble = ""
        taken_s = _monotonic_s(self._node, message.header.stamp)
        # a stamp from the future is kept, for the filter to see that the clocks disagree
        stamp_s = taken_s if taken_s > received_s + 0.005 else min(received_s, taken_s)
        measurement = Measurement(positions, stamp_s, self._external())
        self._last = stamp_ns, measurement
        return measurement

    @property
    def stamp_s(self) -> float:
        """When the last measurement was taken [s, monotonic]; -inf before the first."""
        return -math.inf if self._last is None else self._last[1].stamp_s

    def fresh(self, max_age_s: float) -> bool:
        """Whether the arm's position is known now; ``trouble`` says why not."""
        measured = self.measure()
        if measured is None:
            return False
        age_s = time.monotonic() - measured.stamp_s
        if not abs(age_s) <= max_age_s:
            self.trouble = f"joint states are {age_s:.2f} s old"
        elif self._residuals is not None and measured.residuals is None:
            self.trouble = f"nothing received on {self._residuals.topic}"
        return not self.trouble

    def close(self) -> None:
        self._states.close()
        if self._residuals is not None:
            self._residuals.close()

    def _external(self) -> list[float] | None:
        """External torque or force of every joint, NaN where none is measured; None where none arrives any more."""
        taken = self._residuals.take() if self._residuals else None
        if taken is None or time.monotonic() - taken[1] > RESIDUAL_AGE_S:
            return None
        effort = dict(zip(taken[0].name, taken[0].effort, strict=False))
        return [effort.get(name, math.nan) for name in self._names]


def _by_name(message: JointState, values: Sequence[float], names: Sequence[str]) -> list[float] | None:
    index = {name: i for i, name in enumerate(message.name)}
    if len(values) != len(message.name) or any(name not in index for name in names):
        return None
    return [values[index[name]] for name in names]


class CameraInput:
    """The newest image of every camera, in the size that the policy looks at; ``look`` takes milliseconds."""

    def __init__(self, node: Node, cameras: Mapping[str, str]) -> None:
        self._node = node
        self._newest = {
            name: Newest(node, CompressedImage if topic.endswith("/compressed") else Image, topic)
            for name, topic in cameras.items()
        }

    def close(self) -> None:
        for newest in self._newest.values():
            newest.close()

    def newest(self) -> tuple[dict[str, Any], float] | None:
        """Every camera's message, and when the oldest was taken [s, monotonic]; None while one is missing."""
        messages, oldest_s = {}, math.inf
        for name, newest in self._newest.items():
            taken = newest.take()
            if taken is None:
                return None
            messages[name], received_s = taken
            oldest_s = min(oldest_s, received_s, _monotonic_s(self._node, messages[name].header.stamp))
        return messages, oldest_s

    def look(self, size: Sequence[int]) -> tuple[dict[str, NDArray[np.uint8]], float] | None:
        """``newest`` as RGB images of ``size`` (height, width)."""
        newest = self.newest()
        if newest is None:
            return None
        messages, oldest_s = newest
        return {name: fit_image(image_array(message), size).numpy() for name, message in messages.items()}, oldest_s


def _monotonic_s(node: Node, stamp: Time) -> float:
    """A header stamp (the node's ROS clock) on the monotonic clock."""
    age_s = (node.get_clock().now().nanoseconds - nanoseconds(stamp)) * 1e-9
    return time.monotonic() - age_s


def nanoseconds(stamp: Time) -> int:
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec)


def image_array(message: Image | CompressedImage) -> NDArray[np.uint8]:
    """RGB uint8 [height, width, 3]. ValueError on an encoding other than rgb8, bgr8, or what Pillow reads."""
    if isinstance(message, CompressedImage):
        from PIL import Image as Picture

        with Picture.open(io.BytesIO(bytes(message.data))) as picture:
            return np.asarray(picture.convert("RGB"))
    if message.encoding not in ("rgb8", "bgr8"):
        raise ValueError(f"image encoding {message.encoding!r} is not supported; publish rgb8 or bgr8")
    rows = np.frombuffer(message.data, dtype=np.uint8).reshape(message.height, message.step)
    image = rows[:, : 3 * message.width].reshape(message.height, message.width, 3)
    return image if message.encoding == "rgb8" else np.ascontiguousarray(image[..., ::-1])


def ros_type(module: str, name: str, *, setting: str) -> Any:
    """A type of a package that not every ROS installation has. ValueError says how to get it."""
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        package = module.partition(".")[0]
        raise ValueError(
            f"{setting} needs {name} of the ROS package {package}; on a ROS 2 machine: "
            f"apt install ros-$ROS_DISTRO-{package.replace('_', '-')}, elsewhere do without this setting"
        ) from error


class FrameInput:
    """Frames from /tf and /tf_static until ``check`` has passed: they wake the executor, so the arm moves only then."""

    def __init__(self, node: Node) -> None:
        kind = ros_type("tf2_msgs.msg", "TFMessage", setting="tool_frame")
        self._tree, self._node = FrameTree(), node
        kept = QoSProfile(depth=100, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._subscriptions = [
            node.create_subscription(kind, topic, self._hear, qos)
            for topic, qos in (("/tf", QoSProfile(depth=100)), ("/tf_static", kept))
        ]

    def check(self, robot: Robot, joints: JointInput) -> None:
        """Once: whether TF and the robot file agree. ValueError says what is missing or disagrees."""
        if not self._subscriptions:
            return
        measured = joints.measure()
        if measured is None:
            raise ValueError(joints.trouble)
        check_tool(self._tree, robot, measured.positions)
        self.close()

    def close(self) -> None:
        for subscription in self._subscriptions:
            self._node.destroy_subscription(subscription)
        self._subscriptions = []

    def _hear(self, message: Any) -> None:
        remember(self._tree, message.transforms)


def remember(tree: FrameTree, transforms: Sequence[TransformStamped]) -> None:
    for stamped in transforms:
        place, turn = stamped.transform.translation, stamped.transform.rotation
        tree.put(
            stamped.child_frame_id,
            stamped.header.frame_id,
            (place.x, place.y, place.z),
            (turn.x, turn.y, turn.z, turn.w),
        )


class Goals:
    """A FollowJointTrajectory action as if it were a topic: every goal replaces the one before, results do not matter.

    Goals are sent only while there is a server, as nothing else would ever answer them.
    """

    def __init__(self, node: Node, action: str) -> None:
        self._type = ros_type(
            "control_msgs.action", "FollowJointTrajectory", setting="command_type: follow_joint_trajectory"
        )
        self._client = ActionClient(node, self._type, action)

    def publish(self, trajectory: JointTrajectory) -> None:
        if self._client.server_is_ready():
            self._client.send_goal_async(self._type.Goal(trajectory=trajectory))

    def close(self) -> None:
        self._client.destroy()


class CommandOutput:
    """Publishes safe commands as the configured type. ValueError if its package is not installed."""

    def __init__(self, node: Node, ros: RosSection, limits: RobotLimits) -> None:
        self._node, self._ros = node, ros
        self._names = [axis.name for axis in limits.axes]
        self._dt = 1.0 / limits.command_hz
        topic = partial(node.create_publisher, topic=ros.command, qos_profile=QoSProfile(depth=1))
        self._message: Callable[[SafeCommand, StopPath], Any]
        match ros.command_type:
            case "joint_trajectory":
                self._publisher, self._message = topic(JointTrajectory), self._trajectory
            case "follow_joint_trajectory":
                self._publisher, self._message = Goals(node, ros.command), self._trajectory
            case "float64_multi_array":
                self._publisher, self._message = topic(Float64MultiArray), self._positions
            case "joint_jog":
                self._jog_type = ros_type("control_msgs.msg", "JointJog", setting="command_type: joint_jog")
                self._publisher, self._message = topic(self._jog_type), self._jog
            case "twist_stamped":
                self._publisher, self._message = topic(TwistStamped), self._twist
        self._gripper = None
        if ros.command_type == "twist_stamped":
            assert limits.workspace is not None
            chain = {frame.joint for frame in limits.workspace.frames}
            self._tool = ToolPoint(limits.workspace.frames, limits.workspace.tool, limits.axes)
            self._others = [i for i, name in enumerate(self._names) if name not in chain]
            if self._others:
                self._gripper = node.create_publisher(Float64MultiArray, ros.gripper, QoSProfile(depth=1))

    def send(self, out: SafeCommand, stop_path: StopPath) -> None:
        """The command for this tick; as a trajectory it carries the whole stop that follows if nothing more comes."""
        self._publisher.publish(self._message(out, stop_path))
        if self._gripper is not None:
            self._gripper.publish(Float64MultiArray(data=[out.positions[i] for i in self._others]))

    def close(self) -> None:
        if isinstance(self._publisher, Goals):
            self._publisher.close()
        else:
            self._node.destroy_publisher(self._publisher)
        if self._gripper is not None:
            self._node.destroy_publisher(self._gripper)

    def _trajectory(self, out: SafeCommand, stop_path: StopPath) -> JointTrajectory:
        points = [_point(out.positions, out.velocities, self._dt)]
        every = max(1, -(-len(stop_path) // STOP_POINTS))
        last = len(stop_path) - 1
        for i, (positions, velocities) in enumerate(stop_path):
            if i == last or (i + 1) % every == 0:
                points.append(_point(positions, velocities, (i + 2) * self._dt))
        # header stamp zero: "start on arrival", so the controller's clock need not agree with ours
        return JointTrajectory(joint_names=self._names, points=points)

    def _positions(self, out: SafeCommand, stop_path: StopPath) -> Float64MultiArray:
        return Float64MultiArray(data=list(out.positions))

    def _jog(self, out: SafeCommand, stop_path: StopPath) -> Any:
        message = self._jog_type(joint_names=self._names, velocities=list(out.velocities))
        message.duration = self._dt
        message.header.stamp = self._node.get_clock().now().to_msg()  # Servo drops commands that are too old
        message.header.frame_id = self._ros.command_frame
        return message

    def _twist(self, out: SafeCommand, stop_path: StopPath) -> TwistStamped:
        message = TwistStamped()
        message.header.stamp = self._node.get_clock().now().to_msg()
        message.header.frame_id = self._ros.command_frame
        for vector, values in zip(
            (message.twist.linear, message.twist.angular),
            self._tool.twist(out.positions, out.velocities),
            strict=True,
        ):
            vector.x, vector.y, vector.z = values
        return message


def _point(positions: Sequence[float], velocities: Sequence[float], after_s: float) -> JointTrajectoryPoint:
    seconds, rest = divmod(round(after_s * 1e9), 1_000_000_000)
    return JointTrajectoryPoint(
        positions=list(positions),
        velocities=list(velocities),
        time_from_start=Duration(sec=seconds, nanosec=rest),
    )
