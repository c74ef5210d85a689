"""Receiving ROS messages by polling: the middleware keeps the newest message, and the reader takes it.

No executor wakes up for 500 joint states a second or copies images that are not used, so neither a fast sensor nor a
flooded topic delays the control loop. Needs rclpy.
"""

from __future__ import annotations

import importlib
import threading
import time
from collections.abc import Mapping
from typing import Any

from builtin_interfaces.msg import Time
from rclpy.callback_groups import CallbackGroup
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile, ReliabilityPolicy

SENSOR_QOS = QoSProfile(depth=1, reliability=ReliabilityPolicy.BEST_EFFORT)
LATCHED_QOS = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)


class _Polled(CallbackGroup):
    """A group whose members no executor may run."""

    def can_execute(self, entity: Any) -> bool:
        return False

    def beginning_execution(self, entity: Any) -> bool:
        return False

    def ending_execution(self, entity: Any) -> None:
        raise RuntimeError("a polled subscription was executed")


class LatestMessage:
    """The last message of a topic and when it was received [s, monotonic], however late it is taken. ``depth``:
    messages kept.
    """

    def __init__(self, node: Node, kind: type, topic: str, *, depth: int = 1, qos: QoSProfile | None = None) -> None:
        self._node, self.topic, self._depth = node, topic, depth
        profile = qos or QoSProfile(depth=depth, reliability=ReliabilityPolicy.BEST_EFFORT)
        self._subscription = node.create_subscription(kind, topic, self._never, profile, callback_group=_Polled())
        self._last: tuple[Any, float] | None = None
        self._lock = threading.Lock()  # messages that two threads take stay in order

    def take(self) -> tuple[Any, float] | None:
        """(message, when), or None before the first."""
        self.take_new()
        return self._last

    def take_new(self) -> list[Any]:
        """The messages received since the last call, oldest first; at most ``depth``."""
        handle = self._subscription.handle
        messages: list[Any] = []
        with self._lock, handle:
            while len(messages) < self._depth:
                taken = handle.take_message(self._subscription.msg_type, False)
                if taken is None:
                    break
                message, info = taken
                messages.append(message)
                self._last = message, _received_s(info)
        return messages

    def close(self) -> None:
        self._node.destroy_subscription(self._subscription)

    def _never(self, message: Any) -> None:
        raise RuntimeError(f"{self.topic} is polled")


def _received_s(info: Mapping[str, int]) -> float:
    """When the middleware received a message [s, monotonic]; when it was sent, where the middleware does not say
    (CycloneDDS). Neither is later than now, whatever the sender's clock says.
    """
    now_s = time.monotonic()  # first: time without the processor makes the message older, not newer
    age_ns = time.time_ns() - (info["received_timestamp"] or info["source_timestamp"])
    return now_s - max(0, age_ns) * 1e-9


def monotonic_s(node: Node, stamp: Time) -> float:
    """A header stamp (the node's ROS clock) on the monotonic clock."""
    age_s = (node.get_clock().now().nanoseconds - nanoseconds(stamp)) * 1e-9
    return time.monotonic() - age_s


def nanoseconds(stamp: Time) -> int:
    """A header stamp in nanoseconds."""
    return int(stamp.sec) * 1_000_000_000 + int(stamp.nanosec)


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
