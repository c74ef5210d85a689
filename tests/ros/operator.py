"""The operator of the robot in the ROS tests: one JSON request per line in, one JSON answer per line out.

["transition", id]   ["state"]   ["trigger", service]   ["end", success]
    ["set", node, parameter, value]   ["get", node, parameter]   ["status"]   ["speed"]   ["joints"]

With --without-joints it does not follow the joints, which are many messages.
"""

from __future__ import annotations

import json
import sys
import time

import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from lifecycle_msgs.msg import Transition
from lifecycle_msgs.srv import ChangeState, GetState
from rcl_interfaces.msg import Parameter as ParameterMessage
from rcl_interfaces.msg import ParameterType, ParameterValue
from rcl_interfaces.srv import GetParameters, SetParameters
from rclpy.node import Node
from rclpy.qos import DurabilityPolicy, QoSProfile
from sensor_msgs.msg import JointState
from std_msgs.msg import Bool
from std_srvs.srv import SetBool, Trigger

from real_robot.ros.spin import SpinThread


class Operator(Node):
    def __init__(self, *, joints: bool) -> None:
        super().__init__("operator")
        self.status: dict[str, str] = {}
        self.clients_kept: dict = {}
        self.joints: tuple[list[str], list[float], list[float]] = ([], [], [])
        self.success = self.failure = False
        self.stopped: bool | None = None
        latched = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
        self._subs = [
            self.create_subscription(DiagnosticArray, "/diagnostics", self._on_status, 10),
            self.create_subscription(Bool, "/fake_arm/success", self._on_success, latched),
            self.create_subscription(Bool, "/fake_arm/failure", self._on_failure, latched),
            self.create_subscription(Bool, "/vla_rl_policy/stopped", self._on_stopped, latched),
        ]
        if joints:
            self._subs.append(self.create_subscription(JointState, "/joint_states", self._on_joints, 1))

    def _on_status(self, message: DiagnosticArray) -> None:
        status = message.status[0]
        self.status = {"message": status.message, "seen": str(time.monotonic())}
        self.status.update({value.key: value.value for value in status.values})

    def _on_joints(self, message: JointState) -> None:
        self.joints = (list(message.name), list(message.position), list(message.velocity))

    def _on_success(self, message: Bool) -> None:
        self.success = message.data

    def _on_failure(self, message: Bool) -> None:
        self.failure = message.data

    def _on_stopped(self, message: Bool) -> None:
        self.stopped = message.data

    def call(self, kind, name: str, request):
        # kept: a reply can be lost while a new client's endpoints are still being matched
        if name not in self.clients_kept:
            self.clients_kept[name] = self.create_client(kind, name)
        client = self.clients_kept[name]
        if not client.wait_for_service(timeout_sec=15.0):
            return None
        future = client.call_async(request)
        deadline = time.monotonic() + 3.0
        while not future.done() and time.monotonic() < deadline:
            time.sleep(0.005)
        return future.result()

    def answer(self, request: list):
        match request:
            case ["transition", int(number)]:
                reply = self.call(
                    ChangeState, "/vla_rl_policy/change_state", ChangeState.Request(transition=Transition(id=number))
                )
                return reply is not None and reply.success
            case ["state"]:
                reply = self.call(GetState, "/vla_rl_policy/get_state", GetState.Request())
                return None if reply is None else reply.current_state.label
            case ["trigger", str(service)]:
                reply = self.call(Trigger, service, Trigger.Request())
                return None if reply is None else [reply.success, reply.message]
            case ["end", bool(success)]:
                reply = self.call(SetBool, "/vla_rl_policy/end_episode", SetBool.Request(data=success))
                return None if reply is None else [reply.success, reply.message]
            case ["set", str(node), str(name), value]:
                kinds = {
                    str: (ParameterType.PARAMETER_STRING, "string_value"),
                    int: (ParameterType.PARAMETER_INTEGER, "integer_value"),
                }
                kind, field = kinds[type(value)]
                message = ParameterMessage(name=name, value=ParameterValue(type=kind, **{field: value}))
                reply = self.call(SetParameters, f"/{node}/set_parameters", SetParameters.Request(parameters=[message]))
                return None if reply is None else [reply.results[0].successful, reply.results[0].reason]
            case ["get", str(node), str(name)]:
                reply = self.call(GetParameters, f"/{node}/get_parameters", GetParameters.Request(names=[name]))
                return None if reply is None else reply.values[0].string_value
            case ["status"]:
                return self.status
            case ["speed"]:
                return max(map(abs, self.joints[2]), default=None)
            case ["joints"]:
                return self.joints[1]
            case ["outcome"]:
                return [self.success, self.failure]
            case ["stopped"]:
                return self.stopped
        raise ValueError(request)


if __name__ == "__main__":
    rclpy.init()
    operator = Operator(joints="--without-joints" not in sys.argv)
    spinning = SpinThread(operator)
    for line in sys.stdin:
        print(json.dumps(operator.answer(json.loads(line))), flush=True)
    spinning.close()
