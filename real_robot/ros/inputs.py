"""Joint measurements and camera images from ROS topics. Needs rclpy."""

from __future__ import annotations

import io
import math
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, Image, JointState
from std_msgs.msg import Bool

from episodes.formats.images import fit_image
from real_robot.control.mobile_base import BaseOdometry, yaw_of
from real_robot.images import reading_images
from real_robot.robot_file import Controller, Robot, RosSection
from real_robot.ros.messages import LatestMessage, monotonic_s, nanoseconds, ros_type
from real_robot.safety.commands import Measurement

RESIDUAL_AGE_S = 0.1  # older external torques are not used
JOINT_MESSAGES = 16  # between two ticks, of all publishers of joint states
STOP_INPUT_AGE_S = 0.25
SIMULATED_TIME = (
    "use_sim_time is true: limits and ages are in real seconds; set it to false, and let a simulated robot stamp its "
    "messages with the system's time"
)
# red, green and blue among the channels of an encoding
ENCODINGS = {"rgb8": (0, 1, 2), "bgr8": (2, 1, 0), "rgba8": (0, 1, 2), "bgra8": (2, 1, 0), "mono8": (0, 0, 0)}
REORDERED_NS = 1_000_000_000  # a header that is older than the last one by more: the arm's clock was set


class JointInput:
    """Joint measurements by name, never by position in the message; several publishers may share a topic.

    ValueError if a controller names odometry and the ROS package of its message is missing.
    """

    def __init__(self, node: Node, robot: Robot) -> None:
        ros = robot.ros
        self._node, self._names = node, [axis.name for axis in robot.limits.axes]
        topics = dict.fromkeys([ros.joint_states, *(one.joint_states for one in robot.controllers if one.joint_states)])
        self._topics: list[LatestMessage | OdometryInput] = [
            *(LatestMessage(node, JointState, topic, depth=JOINT_MESSAGES) for topic in topics),
            *(OdometryInput(node, one) for one in robot.controllers if one.odometry),
        ]
        self._residuals = LatestMessage(node, JointState, ros.residuals) if ros.residuals else None
        self._joints: dict[str, tuple[float, int, float]] = {}  # position, header stamp [ns], when measured [s]
        self._lock = threading.Lock()  # the control thread measures, and so does who starts or records
        self.stamp_s = -math.inf
        self.problem = f"nothing received on {ros.joint_states}"

    def measure(self) -> Measurement | None:
        """The newest position of every joint; when the oldest of them was measured, on the monotonic clock.

        None before the first message and while joints are missing (``problem``).
        """
        with self._lock:
            messages = [message for topic in self._topics for message in topic.take_new()]
            for message in messages:
                self._add(message)
            if not self._joints and not messages:
                return None
            if missing := [name for name in self._names if name not in self._joints]:
                self.problem = f"joint states lack {missing}"
                return None
            joints = [self._joints[name] for name in self._names]
            self.stamp_s = min(stamp_s for _, _, stamp_s in joints)
            return Measurement([q for q, _, _ in joints], self.stamp_s, self._external_torques())

    def _add(self, message: JointState) -> None:
        """A position is stamped by the older of header and receipt.

        A header up to a second older than the last one of the joint was reordered and is not used; if it is older, the
        arm's clock was set.
        """
        if len(message.position) != len(message.name):
            self.problem = "joint states without a position for each name"
            return
        stamp_ns, received_s = nanoseconds(message.header.stamp), time.monotonic()
        taken_s = monotonic_s(self._node, message.header.stamp)
        # a stamp from the future is kept, so that the filter rejects it
        stamp_s = taken_s if taken_s > received_s + 0.005 else min(received_s, taken_s)
        for name, position in zip(message.name, message.position, strict=True):
            if name in self._joints and 0 < self._joints[name][1] - stamp_ns < REORDERED_NS:
                self.problem = "joint states arrive out of order"
                return
            if name in self._names:
                self._joints[name] = position, stamp_ns, stamp_s
                self.problem = ""

    def fresh(self, max_age_s: float) -> bool:
        """Whether the joints were measured within ``max_age_s``; ``problem`` says why not."""
        measured = self.measure()
        if measured is None:
            return False
        age_s = time.monotonic() - measured.stamp_s
        if not abs(age_s) <= max_age_s:
            self.problem = f"joint states are {age_s:.2f} s old"
        elif self._residuals is not None and measured.residuals is None:
            self.problem = f"nothing received on {self._residuals.topic}"
        return not self.problem

    def close(self) -> None:
        for topic in self._topics:
            topic.close()
        if self._residuals is not None:
            self._residuals.close()

    def _external_torques(self) -> list[float] | None:
        """External torque or force of every joint, NaN where none is measured; None if the message is too old."""
        taken = self._residuals.take() if self._residuals else None
        if taken is None or time.monotonic() - taken[1] > RESIDUAL_AGE_S:
            return None
        effort = dict(zip(taken[0].name, taken[0].effort, strict=False))
        return [effort.get(name, math.nan) for name in self._names]


class OdometryInput:
    """A base's Odometry as joint states. ValueError if the ROS package nav_msgs is missing."""

    def __init__(self, node: Node, controller: Controller) -> None:
        kind = ros_type("nav_msgs.msg", "Odometry", setting="odometry")
        self._names, self._base = list(controller.joints), BaseOdometry(len(controller.joints))
        self._topic = LatestMessage(node, kind, controller.odometry, depth=JOINT_MESSAGES)

    def take_new(self) -> list[JointState]:
        return [self._joints(message) for message in self._topic.take_new()]

    def _joints(self, message: Any) -> JointState:
        pose = message.pose.pose
        turn = pose.orientation
        yaw = yaw_of(turn.x, turn.y, turn.z, turn.w)
        positions = self._base.positions(pose.position.x, pose.position.y, yaw)
        return JointState(header=message.header, name=self._names, position=positions)

    def close(self) -> None:
        self._topic.close()


class StopInputs:
    """The emergency stop and the enabling device of the robot file, if it names them; both are Bool topics.

    The emergency stop is also pressed when it was last heard longer than ``STOP_INPUT_AGE_S`` ago, and the enabling
    device is held only while it says so often enough: a lost cable stops the arm. So does simulated time: limits and
    ages are of real seconds.
    """

    def __init__(self, node: Node, ros: RosSection) -> None:
        self._clock = node.get_clock()
        self._inputs = {
            name: (LatestMessage(node, Bool, topic), wanted)
            for name, topic, wanted in (
                ("emergency stop", ros.emergency_stop, False),
                ("enabling device", ros.enabling_device, True),
            )
            if topic
        }

    def problem(self) -> str:
        """Why the arm may not move, or ""."""
        if self._clock.ros_time_is_active:
            return SIMULATED_TIME
        for name, (topic, wanted) in self._inputs.items():
            taken = topic.take()
            if taken is None or time.monotonic() - taken[1] > STOP_INPUT_AGE_S:
                return f"the {name} on {topic.topic} is silent"
            if taken[0].data is not wanted:
                return f"the {name} is {'released' if wanted else 'pressed'}"
        return ""

    def close(self) -> None:
        for topic, _ in self._inputs.values():
            topic.close()


class CameraInput:
    """The newest image of every camera. ``cameras``: name -> topic. ``images`` takes milliseconds."""

    def __init__(self, node: Node, cameras: Mapping[str, str]) -> None:
        self._node = node
        self._topics = {
            name: LatestMessage(node, CompressedImage if topic.endswith("/compressed") else Image, topic)
            for name, topic in cameras.items()
        }

    def close(self) -> None:
        for topic in self._topics.values():
            topic.close()

    def newest(self) -> tuple[dict[str, Any], float] | None:
        """Every camera's message, and when the oldest was taken [s, monotonic], now without cameras; None while one is
        missing.
        """
        messages, oldest_s = {}, time.monotonic() if not self._topics else math.inf
        for name, topic in self._topics.items():
            taken = topic.take()
            if taken is None:
                return None
            messages[name], received_s = taken
            oldest_s = min(oldest_s, received_s, monotonic_s(self._node, messages[name].header.stamp))
        return messages, oldest_s

    def taken_s(self) -> float | None:
        """When the oldest of the newest images was taken [s, monotonic]; None while one is missing."""
        newest = self.newest()
        return None if newest is None else newest[1]

    def images(self, size: Sequence[int]) -> tuple[dict[str, UInt8[np.ndarray, "height width 3"]], float] | None:
        """``newest`` as RGB images of ``size`` (height, width). UnreadableImages if one of them is none."""
        newest = self.newest()
        if newest is None:
            return None
        messages, oldest_s = newest
        with reading_images():
            images = {name: fit_image(image_array(message), size).numpy() for name, message in messages.items()}
        return images, oldest_s


def image_array(message: Image | CompressedImage) -> UInt8[np.ndarray, "height width 3"]:
    """RGB. ValueError, also OSError for a compressed image, if it cannot be read."""
    if isinstance(message, CompressedImage):
        from PIL import Image as PillowImage

        with PillowImage.open(io.BytesIO(bytes(message.data))) as image:
            return np.asarray(image.convert("RGB"))
    if message.encoding not in ENCODINGS:
        raise ValueError(f"image encoding {message.encoding!r} is not supported; publish one of {', '.join(ENCODINGS)}")
    channels = ENCODINGS[message.encoding]
    depth = 1 if message.encoding == "mono8" else len(message.encoding) - 1
    width = depth * message.width
    if not message.width or len(message.data) != message.height * message.step or message.step < width:
        raise ValueError(
            f"an image of {message.width} x {message.height}, {message.encoding}, has {len(message.data)} bytes in "
            f"lines of {message.step}"
        )
    lines = np.frombuffer(message.data, dtype=np.uint8).reshape(message.height, message.step)
    pixels = lines[:, :width].reshape(message.height, message.width, depth)
    return pixels if channels == (0, 1, 2) and depth == 3 else np.ascontiguousarray(pixels[..., list(channels)])
