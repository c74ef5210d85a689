"""What a person at a terminal asks the robot and its node. Needs rclpy."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray
from jaxtyping import UInt8
from rclpy.context import Context
from rclpy.node import Node
from rclpy.signals import SignalHandlerOptions
from std_srvs.srv import SetBool, Trigger

from real_robot.calibration import end_effector_pixel, marked
from real_robot.robot_file import Robot, RobotError
from real_robot.ros.inputs import CameraInput, JointInput, StopInputs, image_array
from real_robot.ros.messages import LatestMessage
from real_robot.ros.services import NodeServices
from real_robot.ros.spin import SpinThread

NODE = "/vla_rl_policy"
ANSWER_S = 10.0
_ABSENT = f"no node {NODE} on this ROS domain; start it: vla-rl deploy BUNDLE --robot FILE --instruction TEXT"


class _Participant:
    """A node in a ROS context of its own, until ``close``."""

    def __init__(self, name: str) -> None:
        self._context = Context()
        rclpy.init(context=self._context, signal_handler_options=SignalHandlerOptions.NO)
        self.node = Node(name, context=self._context)

    def close(self) -> None:
        self.node.destroy_node()
        rclpy.shutdown(context=self._context)


class Operator(_Participant):
    """Calls the services of ``vla_rl_policy``."""

    def __init__(self) -> None:
        super().__init__("vla_rl_operator")
        self._spinning = SpinThread(self.node)

    def call(self, name: str, *, data: bool | None) -> tuple[bool, str]:
        """(done, message). RobotError without an answer."""
        kind, request = (Trigger, Trigger.Request()) if data is None else (SetBool, SetBool.Request(data=data))
        services = NodeServices(self.node, NODE, {name: kind}, absent=_ABSENT)
        stop = name == "stop"
        reply = services.call(name, request, discovery_s=ANSWER_S, timeout_s=ANSWER_S, repeatable=stop)
        return bool(reply.success), str(reply.message)

    def status(self) -> dict[str, Any]:
        """The newest diagnostics. RobotError if none arrive."""
        newest = LatestMessage(self.node, DiagnosticArray, "/diagnostics", depth=10)
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline:
            time.sleep(0.05)
            for status in (status for array in newest.take_new() for status in array.status):
                if status.name.startswith(NODE.strip("/")):
                    return {"message": status.message, **{value.key: value.value for value in status.values}}
        raise RobotError(f"no diagnostics: {_ABSENT}")

    def close(self) -> None:
        self._spinning.close()
        super().close()


class Listener(_Participant):
    """Hears a robot without commanding it."""

    def __init__(self, robot: Robot) -> None:
        super().__init__("vla_rl_check")
        self._robot = robot
        self._joints = JointInput(self.node, robot)
        self._cameras = {name: CameraInput(self.node, {name: topic}) for name, topic in robot.ros.cameras.items()}
        self._stops = StopInputs(self.node, robot.ros)

    def images(self) -> dict[str, UInt8[np.ndarray, "height width 3"]]:
        """The newest image of every camera that is heard, with a cross where its calibration has the end effector."""
        measured, result = self._joints.measure(), {}
        for name, input in self._cameras.items():
            if (newest := input.newest()) is None:
                continue
            image = image_array(newest[0][name])
            camera = self._robot.calibration.get(name)
            if camera is not None and measured is not None:
                size = image.shape[0], image.shape[1]
                image = marked(image, end_effector_pixel(camera, self._robot.limits, list(measured.positions), size))
            result[name] = image
        return result

    def problems(self) -> list[str]:
        """What is not heard, or not as the robot file says."""
        limits, max_image_age_s = self._robot.limits, self._robot.control.max_image_age_s
        found = [] if self._joints.fresh(limits.max_measurement_age_s) else [self._joints.problem]
        measured = self._joints.measure()
        for axis, q in zip(limits.axes, measured.positions if measured else (), strict=False):
            if not axis.position[0] <= q <= axis.position[1]:
                found.append(f"joint {axis.name} is at {q:.4f} {axis.unit}, outside {axis.position}")
        for name, camera in self._cameras.items():
            newest = camera.newest()
            try:
                if newest is None:
                    raise ValueError(f"nothing received on {self._robot.ros.cameras[name]}")
                image_array(newest[0][name])
                if abs(age_s := time.monotonic() - newest[1]) > max_image_age_s:
                    raise ValueError(
                        f"its image is {age_s:.2f} s old by its header, more than control.max_image_age_s; is it "
                        "running, are its images stamped, and has its computer the same time?"
                    )
            except (ValueError, OSError) as error:
                found.append(f"camera {name}: {error}")
        if reason := self._stops.problem():
            found.append(reason)
        found += [
            f"{others} publishers on {controller.command}: another node may move the arm"
            for controller in self._robot.controllers
            if (others := self.node.count_publishers(controller.command))
        ]
        return found
