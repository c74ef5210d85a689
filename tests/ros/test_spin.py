"""The thread of a node's callbacks ends without an error, whatever it is doing."""

from __future__ import annotations

import sys
import threading
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
            deadline_s = time.monotonic() + 30.0
            while not called and time.monotonic() < deadline_s:  # on a loaded machine
                time.sleep(0.001)
            spinning.close()
            calls = len(called)
            time.sleep(0.001)
            assert 0 < calls == len(called)
            node.destroy_node()
    finally:
        sys.setswitchinterval(interval)
        rclpy.shutdown(context=context)


def test_an_error_of_one_callback_is_named_and_the_others_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROS_LOCALHOST_ONLY", "1")
    seen: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    context = Context()
    rclpy.init(context=context)
    node, called = Node("spun", context=context), []
    node.create_timer(0.01, lambda: [].pop())  # type: ignore[var-annotated]
    node.create_timer(0.01, lambda: called.append(time.monotonic()))
    spinning = SpinThread(node)
    deadline = time.monotonic() + 20.0
    while len(called) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    spinning.close()
    node.destroy_node()
    rclpy.shutdown(context=context)
    assert len(called) >= 5
    assert spinning.problem == "a callback failed: IndexError: pop from empty list"
    assert seen[0].exc_type is IndexError
