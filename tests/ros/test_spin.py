"""The thread of a node's callbacks ends without an error, whatever it is doing."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec

import pytest

if find_spec("rclpy") is None:
    pytest.skip("this Python has no rclpy; make test-ros runs these in one that has", allow_module_level=True)

import rclpy
from rclpy.context import Context
from rclpy.node import Node

from real_robot.ros.spin import SpinThread

pytestmark = pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning")  # of a parser that rclpy imports


def test_closing_at_any_moment_raises_nothing_in_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest fails on an exception of a thread. With ``Executor.shutdown`` alone: 8 of 400."""
    monkeypatch.setenv("ROS_LOCALHOST_ONLY", "1")
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    context = Context()
    rclpy.init(context=context)
    try:
        for _ in range(200):
            called: list[float] = []
            node = Node("spun", context=context)
            node.create_timer(1e-4, lambda called=called: called.append(time.monotonic()))
            spinning = SpinThread(node)
            time.sleep(0.003)
            spinning.close()
            calls = len(called)
            time.sleep(0.001)
            assert 0 < calls == len(called)
            node.destroy_node()
    finally:
        sys.setswitchinterval(interval)
        rclpy.shutdown(context=context)
