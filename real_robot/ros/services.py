"""Answering a service, and calling those of another node so that no answer is lost. Needs rclpy."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rcl_interfaces.srv import GetParameters
from rclpy.node import Node

from real_robot.robot_file import RobotError

REPEAT_S = 1.0
BRAKING = "braking; protective hold is latched until ~/release"
RELEASED = "released; the arm does not move before ~/resume"


@contextmanager
def answering(response: Any, message: str = "") -> Iterator[None]:
    """Success and ``message`` are the answer; a ValueError is a failure, and its text the message."""
    response.success, response.message = True, message
    try:
        yield
    except ValueError as error:
        response.success, response.message = False, str(error)


class NodeServices:
    """Clients of services of the node ``name``.

    ``kinds``: name of the service in that node -> its type. ``absent``: the error if there is no such node. Calls
    block; an executor spins ``node`` in another thread.

    A server gives up an answer if it has not discovered the client's reader within 100 ms (rmw_fastrtps), and a client
    cannot see whether it has. A process learns of another's readers in the order in which they were made, so before a
    call the node is asked for none of its parameters, again until it answers: the reader of that answer was made last.
    """

    def __init__(self, node: Node, name: str, kinds: Mapping[str, type], *, absent: str) -> None:
        self._absent = absent
        self._clients: dict[str, Any] = {
            service: node.create_client(kind, f"{name}/{service}") for service, kind in kinds.items()
        }
        self._discovered: Any = node.create_client(GetParameters, f"{name}/get_parameters")

    def call(
        self, service: str, request: Any, *, discovery_s: float, timeout_s: float, repeatable: bool = False
    ) -> Any:
        """The answer. RobotError if the node is not there, or not answering, within ``discovery_s``, or gives none
        within ``timeout_s``.

        ``repeatable``: the request does no harm twice; it is made at once, and again until it is answered.
        """
        client = self._clients[service]
        deadline = time.monotonic() + discovery_s
        for needed in (client,) if repeatable else (client, self._discovered):
            if not needed.wait_for_service(timeout_sec=max(0.0, deadline - time.monotonic())):
                raise RobotError(self._absent)
        if not repeatable:
            _repeat(self._discovered, GetParameters.Request(), discovery_s, every_s=REPEAT_S)
        return _repeat(client, request, timeout_s, every_s=REPEAT_S if repeatable else None)


def _repeat(client: Any, request: Any, within_s: float, *, every_s: float | None) -> Any:
    """The answer to ``request``, which is made once where ``every_s`` is None."""
    deadline = time.monotonic() + within_s
    while (answer := client.call(request, timeout_sec=every_s or within_s)) is None:
        if every_s is None or time.monotonic() > deadline:
            raise RobotError(f"{client.srv_name} did not answer within {within_s:g} s")
    return answer
