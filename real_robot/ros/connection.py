"""The ROS side of ``RobotEnv``: sensors, control thread and episode node of one arm, in a ROS context of their own."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import rclpy
from rcl_interfaces.msg import Parameter as ParameterMessage
from rcl_interfaces.srv import SetParameters
from rclpy.context import Context
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from real_robot.control.loop import ControlLoop
from real_robot.control.thread import ControlThread
from real_robot.robot_file import Robot, RobotError
from real_robot.ros.inputs import CameraInput, JointInput, StopInputs
from real_robot.ros.messages import LATCHED_QOS
from real_robot.ros.registry import build_output
from real_robot.ros.services import BRAKING, RELEASED, NodeServices, answering
from real_robot.ros.spin import SpinThread


class EpisodeService:
    """Client of the node that sets up episodes and reports success. Calls block; the executor runs in another thread.

    ``success`` and ``failure``: last published values since ``reset``.
    """

    def __init__(self, node: Node, name: str, *, timeout_s: float) -> None:
        self._name, self._timeout_s = name, timeout_s
        self.success = self.failure = False
        kinds = {"set_parameters": SetParameters, "reset": Trigger}
        absent = f"no node {name} that sets up episodes; start it, or correct ros.episode_node"
        self._services = NodeServices(node, name, kinds, absent=absent)
        self._subscriptions = [
            node.create_subscription(Bool, f"{name}/success", self._on_success, LATCHED_QOS),
            node.create_subscription(Bool, f"{name}/failure", self._on_failure, LATCHED_QOS),
        ]

    def reset(self, task: str, seed: int, *, timeout_s: float) -> str:
        """Set up the episode (task, seed); returns its instruction. RobotError if that is refused or not answered."""
        values = [Parameter("task", value=task), Parameter("seed", value=seed)]
        messages: list[ParameterMessage] = [value.to_parameter_msg() for value in values]
        request = SetParameters.Request(parameters=messages)
        for result in self._call("set_parameters", request, self._timeout_s).results:
            if not result.successful:
                raise RobotError(f"the node {self._name} refuses {task!r}, {seed}: {result.reason}")
        reply = self._call("reset", Trigger.Request(), timeout_s)
        if not reply.success:
            raise RobotError(f"the node {self._name} could not set up the episode: {reply.message}")
        self.success = self.failure = False
        return str(reply.message)

    def _call(self, service: str, request: Any, timeout_s: float) -> Any:
        return self._services.call(service, request, discovery_s=self._timeout_s, timeout_s=timeout_s)

    def _on_success(self, message: Bool) -> None:
        self.success = message.data

    def _on_failure(self, message: Bool) -> None:
        self.failure = message.data


class RobotConnection:
    """Independent of any other use of ROS in the program. Services of the node ``name``: ~/stop, ~/release, ~/resume.

    ``connect`` gives it the loop to drive; ``control`` is there from then on.
    """

    def __init__(
        self, robot: Robot, *, after_tick: Callable[[float], None] = lambda now_s: None, name: str = "vla_rl_env"
    ) -> None:
        context, self._resources = Context(), ExitStack()
        rclpy.init(context=context, signal_handler_options=SignalHandlerOptions.NO)
        self._resources.callback(rclpy.shutdown, context=context)
        self.node = Node(name, context=context)
        self._resources.callback(self.node.destroy_node)
        self.joints = JointInput(self.node, robot)
        self.cameras = CameraInput(self.node, robot.ros.cameras)
        self._stops = StopInputs(self.node, robot.ros)
        self._robot, self._after_tick = robot, after_tick

    def connect(self, loop: ControlLoop) -> ControlThread:
        """Spin, and offer the services; the control thread drives ``loop`` when it is started."""
        self._output = build_output(self.node, self._robot)
        self.control = ControlThread(
            loop,
            self.joints,
            self._output,
            after_tick=self._after_tick,
            checks=(self.problem,),
        )
        self._services = [
            self.node.create_service(Trigger, f"~/{name}", getattr(self, f"_on_{name}"))
            for name in ("stop", "release", "resume")
        ]
        self._spinning = SpinThread(self.node)
        self._resources.callback(self._spinning.close)
        self._resources.callback(self._output.close)
        self._resources.callback(self.control.brake)
        return self.control

    def problem(self) -> str:
        """Why the arm may not move, or ""."""
        return self._stops.problem() or self._output.problem() or self._spinning.problem

    def close(self) -> None:
        """Brake, hold, and leave ROS."""
        self._resources.close()

    def _on_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self.control.stop("the stop service was called")
        response.success, response.message = True, BRAKING
        return response

    def _on_resume(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        with answering(response):
            self.control.resume()
        return response

    def _on_release(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        with answering(response, RELEASED):
            if problem := self.problem():
                raise ValueError(problem)
            self.control.release()
        return response
