"""Between ROS messages and plain numbers. Imported only where rclpy is.

Subscriptions keep the newest serialised message and decode it when somebody looks: at 500 Hz of joint states and two
cameras, decoding everything on arrival would cost the control loop its punctuality.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from builtin_interfaces.msg import Duration, Time
from numpy.typing import NDArray
from rclpy.node import Node
from rclpy.qos import QoSProfile, ReliabilityPolicy
from rclpy.serialization import deserialize_message
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Float64MultiArray
from trajectory_msgs.msg import JointTrajectory, JointTrajectoryPoint

from real_robot.robot_file import RosSection
from real_robot.safety import Measurement, SafeCommand

SENSOR_QOS = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
# A stop path is thinned to at most this many points per trajectory; the controller's splines fill in the rest.
STOP_POINTS = 6


class Newest:
    """The last message of a topic, still serialised, and when it came [s, monotonic]."""

    def __init__(self, node: Node, kind: type, topic: str) -> None:
        self.kind, self.topic, self.received = kind, topic, 0
        self._lock = threading.Lock()
        self._data, self._received_s = b"", float("-inf")
        self._subscription = node.create_subscription(kind, topic, self._keep, SENSOR_QOS, raw=True)

    def _keep(self, data: bytes) -> None:
        with self._lock:
            self._data, self._received_s, self.received = data, time.monotonic(), self.received + 1

    def take(self) -> tuple[Any, float] | None:
        """(message, receipt time), or None before the first."""
        with self._lock:
            data, received_s = self._data, self._received_s
        return (deserialize_message(data, self.kind), received_s) if data else None


class JointInput:
    """Joint measurements by name, never by position in the message."""

    def __init__(self, node: Node, topic: str, names: Sequence[str]) -> None:
        self._node, self._names = node, list(names)
        self._newest = Newest(node, JointState, topic)
        self._last: tuple[int, Measurement] | None = None
        self.trouble = f"nothing received on {topic}"

    def measure(self) -> Measurement | None:
        """The newest measurement, stamped on the monotonic clock by the older of header and receipt.

        A message whose header is older than the last one's was reordered on the way and is not used.
        """
        taken = self._newest.take()
        if taken is None:
            return None
        message, received_s = taken
        stamp_ns = nanoseconds(message.header.stamp)
        if self._last is not None and stamp_ns < self._last[0]:
            self.trouble = "joint states arrive out of order"
            return self._last[1]
        index = {name: i for i, name in enumerate(message.name)}
        missing = [name for name in self._names if name not in index]
        if missing or len(message.position) != len(message.name):
            self.trouble = (
                f"joint states lack {missing}" if missing else "joint states without a position for each name"
            )
            return None
        self.trouble = ""
        positions = [message.position[index[name]] for name in self._names]
        taken_s = _monotonic_s(self._node, message.header.stamp)
        # a stamp from the future is kept, for the filter to see that the clocks disagree
        measurement = Measurement(positions, taken_s if taken_s > received_s + 0.005 else min(received_s, taken_s))
        self._last = stamp_ns, measurement
        return measurement


class CameraInput:
    """The newest image of every camera."""

    def __init__(self, node: Node, cameras: Mapping[str, str]) -> None:
        self._node = node
        self._newest = {
            name: Newest(node, CompressedImage if topic.endswith("/compressed") else Image, topic)
            for name, topic in cameras.items()
        }

    def look(self) -> tuple[Mapping[str, NDArray[np.uint8]], float] | None:
        """RGB images and the age of the oldest, on the monotonic clock; None until every camera has sent one."""
        images, oldest_s = {}, float("inf")
        for name, newest in self._newest.items():
            taken = newest.take()
            if taken is None:
                return None
            message, received_s = taken
            images[name] = image_array(message)
            oldest_s = min(oldest_s, received_s, _monotonic_s(self._node, message.header.stamp))
        return images, oldest_s


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


class CommandOutput:
    """Publishes safe commands as the configured type."""

    def __init__(self, node: Node, ros: RosSection, names: Sequence[str], dt: float) -> None:
        self._names, self._dt = list(names), dt
        self._trajectories = ros.command_type == "joint_trajectory"
        kind = JointTrajectory if self._trajectories else Float64MultiArray
        self._publisher = node.create_publisher(kind, ros.command, QoSProfile(depth=1))

    def send(self, out: SafeCommand, stop_path: Sequence[tuple[Sequence[float], Sequence[float]]]) -> None:
        """The command for this tick; as a trajectory it carries the whole stop that follows if nothing more comes."""
        if not self._trajectories:
            self._publisher.publish(Float64MultiArray(data=list(out.positions)))
            return
        points = [_point(out.positions, out.velocities, self._dt)]
        every = max(1, -(-len(stop_path) // STOP_POINTS))
        last = len(stop_path) - 1
        for i, (positions, velocities) in enumerate(stop_path):
            if i == last or (i + 1) % every == 0:
                points.append(_point(positions, velocities, (i + 2) * self._dt))
        # header stamp zero: "start on arrival", so the controller's clock need not agree with ours
        self._publisher.publish(JointTrajectory(joint_names=self._names, points=points))


def _point(positions: Sequence[float], velocities: Sequence[float], after_s: float) -> JointTrajectoryPoint:
    seconds, rest = divmod(round(after_s * 1e9), 1_000_000_000)
    return JointTrajectoryPoint(
        positions=list(positions),
        velocities=list(velocities),
        time_from_start=Duration(sec=seconds, nanosec=rest),
    )
