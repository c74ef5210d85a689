"""Joint measurements and camera images from ROS topics. Needs rclpy."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8
from rclpy.node import Node
from sensor_msgs.msg import CompressedImage, Image, JointState

from real_robot.images import fit_image
from real_robot.robot_file import RosSection
from real_robot.ros.messages import LatestMessage, monotonic_s, nanoseconds
from real_robot.safety.commands import Measurement

RESIDUAL_AGE_S = 0.1  # older external torques are not used
REORDERED_NS = 1_000_000_000  # a header that is older than the last one by more: the arm's clock was set


class JointInput:
    """Joint measurements by name, never by position in the message."""

    def __init__(self, node: Node, ros: RosSection, names: Sequence[str]) -> None:
        self._node, self._names = node, list(names)
        self._states = LatestMessage(node, JointState, ros.joint_states)
        self._residuals = LatestMessage(node, JointState, ros.residuals) if ros.residuals else None
        self._last: tuple[int, Measurement] | None = None  # header stamp [ns], what it said
        self.problem = f"nothing received on {ros.joint_states}"

    def measure(self) -> Measurement | None:
        """The newest measurement, stamped on the monotonic clock by the older of header and receipt.

        A message whose header is up to a second older than the last one's was reordered and is not used; if it is
        older, the arm's clock was set. None before the first message and while joints are missing (``problem``).
        """
        taken = self._states.take()
        if taken is None:
            return None
        message, received_s = taken
        stamp_ns = nanoseconds(message.header.stamp)
        if self._last is not None and 0 < self._last[0] - stamp_ns < REORDERED_NS:
            self.problem = "joint states arrive out of order"
            return self._last[1]
        positions = _by_name(message, message.position, self._names)
        if positions is None:
            missing = [name for name in self._names if name not in message.name]
            self.problem = (
                f"joint states lack {missing}" if missing else "joint states without a position for each name"
            )
            return None
        self.problem = ""
        taken_s = monotonic_s(self._node, message.header.stamp)
        # a stamp from the future is kept, so that the filter rejects it
        stamp_s = taken_s if taken_s > received_s + 0.005 else min(received_s, taken_s)
        measurement = Measurement(positions, stamp_s, self._external_torques())
        self._last = stamp_ns, measurement
        return measurement

    @property
    def stamp_s(self) -> float:
        """When the last measurement was taken [s, monotonic]; -inf before the first."""
        return -math.inf if self._last is None else self._last[1].stamp_s

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
        self._states.close()
        if self._residuals is not None:
            self._residuals.close()

    def _external_torques(self) -> list[float] | None:
        """External torque or force of every joint, NaN where none is measured; None if the message is too old."""
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
        """Every camera's message, and when the oldest was taken [s, monotonic]; None while one is missing."""
        messages, oldest_s = {}, math.inf
        for name, topic in self._topics.items():
            taken = topic.take()
            if taken is None:
                return None
            messages[name], received_s = taken
            oldest_s = min(oldest_s, received_s, monotonic_s(self._node, messages[name].header.stamp))
        return messages, oldest_s

    def images(self, size: Sequence[int]) -> tuple[dict[str, UInt8[np.ndarray, "height width 3"]], float] | None:
        """``newest`` as RGB images of ``size`` (height, width)."""
        newest = self.newest()
        if newest is None:
            return None
        messages, oldest_s = newest
        return {name: fit_image(image_array(message), size).numpy() for name, message in messages.items()}, oldest_s


def image_array(message: Image | CompressedImage) -> UInt8[np.ndarray, "height width 3"]:
    """RGB. ValueError on an encoding other than rgb8, bgr8, or what Pillow reads."""
    if isinstance(message, CompressedImage):
        from PIL import Image as PillowImage

        with PillowImage.open(io.BytesIO(bytes(message.data))) as image:
            return np.asarray(image.convert("RGB"))
    if message.encoding not in ("rgb8", "bgr8"):
        raise ValueError(f"image encoding {message.encoding!r} is not supported; publish rgb8 or bgr8")
    lines = np.frombuffer(message.data, dtype=np.uint8).reshape(message.height, message.step)
    rgb = lines[:, : 3 * message.width].reshape(message.height, message.width, 3)
    return rgb if message.encoding == "rgb8" else np.ascontiguousarray(rgb[..., ::-1])
