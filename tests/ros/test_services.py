"""Calls of another node's services, whose first answers can be lost."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from real_robot.robot_file import RobotError

if find_spec("rclpy") is None:
    pytest.skip("this Python has no rclpy; make test-ros runs these in one that has", allow_module_level=True)

import rclpy
from rcl_interfaces.srv import GetParameters
from rclpy.callback_groups import ReentrantCallbackGroup
from rclpy.node import Node
from rclpy.task import Future
from std_srvs.srv import Trigger

from real_robot.ros.services import NodeServices
from real_robot.ros.spin import SpinThread
from tests.ros.cell import ROOT

pytestmark = pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning")  # of a parser that rclpy imports
ABSENT = "no node /other; start it"


class Other(Node):
    """Does not answer the first ``lost`` requests for its parameters, nor the first ``lost`` to stop, like a server
    that has not discovered the client."""

    def __init__(self, context: rclpy.Context, lost: int) -> None:
        super().__init__("other", context=context, start_parameter_services=False)
        self.lost, self.questions, self.stops, self.done = lost, 0, 0, 0
        unanswered = ReentrantCallbackGroup()  # questions without an answer do not keep the next one waiting
        self.create_service(GetParameters, "~/get_parameters", self._on_question, callback_group=unanswered)
        self.create_service(Trigger, "~/stop", self._on_stop, callback_group=unanswered)
        self.create_service(Trigger, "~/begin", self._on_begin)

    async def _on_question(self, request: Any, response: Any) -> Any:
        self.questions += 1
        if self.questions <= self.lost:
            await Future()
        return response

    async def _on_stop(self, request: Any, response: Any) -> Any:
        self.stops += 1
        if self.stops <= self.lost:
            await Future()
        return response

    def _on_begin(self, request: Any, response: Any) -> Any:
        self.done += 1
        response.success = True
        return response


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``nodes(lost)``: the other node, and services of it."""
    monkeypatch.setenv("ROS_DOMAIN_ID", str(20 + (os.getpid() + 10) % 80))
    monkeypatch.setenv("FASTRTPS_DEFAULT_PROFILES_FILE", str(ROOT / "real_robot/ros/loopback.xml"))
    context = rclpy.Context()
    rclpy.init(context=context)
    made: list[tuple[SpinThread, Node]] = []

    def spun(node: Node) -> Any:
        made.append((SpinThread(node), node))
        return node

    def make(lost: int | None) -> tuple[Any, NodeServices]:
        other = None if lost is None else spun(Other(context, lost))
        kinds = {"begin": Trigger, "stop": Trigger}
        return other, NodeServices(spun(Node("asks", context=context)), "/other", kinds, absent=ABSENT)

    yield make
    for spinning, node in made:
        spinning.close()
        node.destroy_node()
    rclpy.shutdown(context=context)


def test_a_lost_answer_is_asked_for_again_and_nothing_is_done_twice(nodes: Any) -> None:
    other, services = nodes(lost=2)
    assert services.call("begin", Trigger.Request(), discovery_s=30.0, timeout_s=30.0).success
    assert (other.questions, other.done) == (3, 1)


def test_a_node_that_never_answers_is_not_asked_to_do_anything(nodes: Any) -> None:
    other, services = nodes(lost=1000)
    began_s = time.monotonic()
    with pytest.raises(RobotError, match="/other/get_parameters did not answer within 2 s"):
        services.call("begin", Trigger.Request(), discovery_s=2.0, timeout_s=30.0)
    assert time.monotonic() - began_s >= 2.0
    assert other.done == 0


def test_a_stop_is_sent_at_once_and_again_until_it_is_answered(nodes: Any) -> None:
    other, services = nodes(lost=2)
    services.call("stop", Trigger.Request(), discovery_s=30.0, timeout_s=30.0, repeatable=True)
    assert (other.stops, other.questions) == (3, 0)


def test_a_node_that_is_not_there(nodes: Any) -> None:
    _, services = nodes(lost=None)
    with pytest.raises(RobotError, match=ABSENT):
        services.call("begin", Trigger.Request(), discovery_s=0.5, timeout_s=0.5)
