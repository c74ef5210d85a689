"""The ROS 2 node: an ordinary lifecycle node around ``ControlLoop``, the same on an apt install and on the wheels.

    inactive: connected, watching, commanding nothing         active: commanding every tick, holding when in doubt

``~/stop`` latches a protective hold (announced on ``~/stopped``), ``~/release`` undoes it, ``~/pause`` and ``~/resume``
hold and go on. Deactivation and SIGTERM brake to rest first. The stop is software: it is not an emergency stop.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import numpy as np
import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import ParameterDescriptor, SetParametersResult
from rclpy._rclpy_pybind11 import RCLError
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.qos import DurabilityPolicy, QoSProfile
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import Bool
from std_srvs.srv import Trigger

from real_robot.control_loop import ControlLoop, LoopConfig
from real_robot.embodiment import Embodiment, JointPositions, JointSteps
from real_robot.policy_client import PolicyClient
from real_robot.robot_file import Robot, load_robot
from real_robot.ros_io import CameraInput, CommandOutput, JointInput

_LATCHED = QoSProfile(depth=1, durability=DurabilityPolicy.TRANSIENT_LOCAL)
_PARAMETERS = {
    "robot_file": "YAML file of the robot: limits, control, ros",
    "policy_url": "WebSocket address of the policy server",
    "token_file": "file that holds the policy server's token",
    "instruction": "what the policy is asked to do, may be changed at any time",
}


class Timings:
    """The last thousand ticks: how late they began, and how old the joint measurement was when the command left."""

    def __init__(self) -> None:
        self.late_s: deque[float] = deque(maxlen=1000)
        self.sensor_to_command_s: deque[float] = deque(maxlen=1000)

    def summary(self) -> dict[str, str]:
        """Milliseconds, 50th and 99th percentile."""
        rows = {}
        for name, values in (("tick_jitter", self.late_s), ("sensor_to_command", self.sensor_to_command_s)):
            seen = list(values)
            for percent in (50, 99) if seen else ():
                rows[f"{name}_p{percent}_ms"] = f"{1000.0 * float(np.percentile(seen, percent)):.3f}"
        return rows


class PolicyNode(LifecycleNode):
    """See the module. One control thread, one executor thread; ``_lock`` guards the loop between them."""

    def __init__(self) -> None:
        super().__init__("vla_rl_policy")
        for name, description in _PARAMETERS.items():
            self.declare_parameter(name, "", ParameterDescriptor(description=description))
        self.add_on_set_parameters_callback(self._on_parameters)
        self._lock = threading.Lock()
        self._robot: Robot | None = None
        self._loop: ControlLoop | None = None
        self._client: PolicyClient | None = None
        self._thread: threading.Thread | None = None
        self._running = False
        self._timings = Timings()
        self._stopped = self.create_publisher(Bool, "~/stopped", _LATCHED)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self._triggers = [
            self.create_service(Trigger, f"~/{name}", getattr(self, f"_on_{name}"))
            for name in ("stop", "release", "pause", "resume")
        ]
        self._timer = self.create_timer(1.0, self._diagnose)

    # Lifecycle

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        try:
            self._robot = robot = load_robot(Path(self._text("robot_file")))
            token = Path(self._text("token_file")).read_text().strip()
        except (ValueError, OSError) as error:
            self.get_logger().error(f"cannot configure: {error}")
            return TransitionCallbackReturn.FAILURE
        names = [axis.name for axis in robot.limits.axes]
        self._joints = JointInput(self, robot.ros.joint_states, names)
        self._cameras = CameraInput(self, robot.ros.cameras)
        self._output = CommandOutput(self, robot.ros, names, 1.0 / robot.limits.command_hz)
        self._client = PolicyClient(self._text("policy_url"), token=token, timeout_s=robot.control.server_timeout_s)
        return TransitionCallbackReturn.SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        assert self._robot is not None
        assert self._client is not None
        robot, control, hello = self._robot, self._robot.control, self._client.hello
        measured = self._joints.measure()
        try:
            if hello is None:
                raise ValueError(f"no policy server: {self._client.trouble}")
            if missing := set(hello.cameras) ^ set(robot.ros.cameras):
                raise ValueError(f"policy and robot file disagree about the cameras {sorted(missing)}")
            if measured is None:
                raise ValueError(self._joints.trouble)
            age_s = time.monotonic() - measured.stamp_s
            if not abs(age_s) <= robot.limits.max_measurement_age_s:
                raise ValueError(f"joint states are {age_s:.2f} s old")
            loop = ControlLoop(
                robot.limits,
                LoopConfig(chunking=control.chunking, max_image_age_s=control.max_image_age_s),
                hello=hello,
                embodiment=embodiment_of(robot, hello.control_hz),
                oracle=self._client,
                eyes=self._cameras,
            )
            loop.instruction = self._text("instruction")
            loop.start(list(measured.positions), time.monotonic())
        except ValueError as error:
            self.get_logger().error(f"cannot activate: {error}")
            return TransitionCallbackReturn.FAILURE
        self._loop, self._running = loop, True
        self._stopped.publish(Bool(data=False))
        self._thread = threading.Thread(target=self._run, args=(loop,), name="control", daemon=True)
        self._thread.start()
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.brake()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.release_wires()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.brake()
        self.release_wires()
        return TransitionCallbackReturn.SUCCESS

    def brake(self) -> None:
        """Brake to rest along the stop path, then end the control thread. Returns when the arm is commanded still."""
        if self._thread is None or self._loop is None:
            return
        with self._lock:
            self._loop.pause()
        self._running = False
        self._thread.join(timeout=10.0)
        self._thread = None

    def release_wires(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    # Control

    def _run(self, loop: ControlLoop) -> None:
        """Every command tick until told to end and at rest. Sleeps to absolute times, so lateness never adds up."""
        assert self._robot is not None
        period_s = 1.0 / self._robot.limits.command_hz
        due_s = time.monotonic() + period_s
        while self._running or not loop.filter.at_rest:
            time.sleep(max(0.0, due_s - time.monotonic()))
            measured, now_s = self._joints.measure(), time.monotonic()
            with self._lock:
                out = loop.tick(measured, now_s)
                stop_path = loop.filter.stop_path()
            self._output.send(out, stop_path)
            self._timings.late_s.append(now_s - due_s)
            if measured is not None:
                self._timings.sensor_to_command_s.append(time.monotonic() - measured.stamp_s)
            due_s += period_s * max(1, round((now_s - due_s) / period_s) + 1)

    def _on_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        if self._loop is not None:
            with self._lock:
                self._loop.stop("the stop service was called")
        self._stopped.publish(Bool(data=True))
        response.success, response.message = True, "braking; protective hold is latched until ~/release"
        return response

    def _on_release(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success, response.message = True, "released"
        if self._loop is not None:
            try:
                with self._lock:
                    self._loop.filter.release()
            except ValueError as error:
                response.success, response.message = False, str(error)
        self._stopped.publish(Bool(data=not response.success))
        return response

    def _on_pause(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        return self._with_loop(ControlLoop.pause, response)

    def _on_resume(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        return self._with_loop(ControlLoop.resume, response)

    def _with_loop(self, action: Callable[[ControlLoop], None], response: Trigger.Response) -> Trigger.Response:
        response.success = self._loop is not None and self._running
        response.message = "" if response.success else "the node is not active"
        if response.success:
            assert self._loop is not None
            with self._lock:
                action(self._loop)
        return response

    # What others may know and set

    def _text(self, name: str) -> str:
        return str(self.get_parameter(name).value)

    def _on_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        for parameter in parameters:
            if parameter.type_ is not Parameter.Type.STRING:
                return SetParametersResult(successful=False, reason=f"{parameter.name} is a text")
            if parameter.name == "instruction":
                if len(parameter.value.encode()) > 96:
                    return SetParametersResult(successful=False, reason="an instruction has at most 96 bytes")
                if self._loop is not None:
                    self._loop.instruction = parameter.value
        return SetParametersResult(successful=True)

    def _diagnose(self) -> None:
        status = DiagnosticStatus(name=f"{self.get_name()}: control", hardware_id="")
        troubles = []
        if self._client is not None:
            troubles += [self._client.trouble, self._joints.trouble]
        if self._loop is not None:
            troubles += [
                self._loop.trouble,
                f"stopped: {self._loop.filter.stopped}" if self._loop.filter.stopped else "",
            ]
            values = {**vars(self._loop.counters), "active": self._running, "at_rest": self._loop.filter.at_rest}
            values |= self._timings.summary()
            status.values = [KeyValue(key=key, value=str(value)) for key, value in values.items()]
        status.message = "; ".join(trouble for trouble in troubles if trouble) or "ok"
        status.level = DiagnosticStatus.OK if status.message == "ok" else DiagnosticStatus.WARN
        array = DiagnosticArray(status=[status])
        array.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(array)


def embodiment_of(robot: Robot, control_hz: float) -> Embodiment:
    """The one dispatch from the name in the robot file."""
    axes = robot.limits.axes
    if robot.control.embodiment == "joint_positions":
        return JointPositions(axes)
    if robot.control.embodiment == "joint_steps":
        return JointSteps(axes, control_hz)
    from real_robot.panda_tool import PandaTool

    return PandaTool(axes)


def main(arguments: list[str] | None = None, *, autostart_s: float = 0.0) -> int:
    """Spin until SIGINT or SIGTERM, then brake, hold, and end with 0.

    ``autostart_s``: configure and activate by itself, trying for so long; 1 if it cannot. 0 leaves both to others.
    """
    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ending.set())
    node = PolicyNode()
    executor = SingleThreadedExecutor()
    executor.add_node(node)
    started = not autostart_s or _start(node, executor, ending, time.monotonic() + autostart_s)
    while started and not ending.is_set():
        try:
            executor.spin_once(timeout_sec=0.1)
        except ExternalShutdownException:
            break
        except RCLError as error:  # a transition that is not allowed now: rclpy lets it through to here
            node.get_logger().error(f"refused: {error}")
    node.brake()
    node.release_wires()
    executor.shutdown(timeout_sec=2.0)
    node.destroy_node()
    rclpy.try_shutdown()
    return 0 if started else 1


def _start(node: PolicyNode, executor: SingleThreadedExecutor, ending: threading.Event, until_s: float) -> bool:
    """Configure, then activate as soon as joints, cameras and policy server are there."""
    if node.trigger_configure() is not TransitionCallbackReturn.SUCCESS:
        return False
    while time.monotonic() < until_s and not ending.is_set():
        pause_s = time.monotonic() + 0.5
        while time.monotonic() < pause_s:
            executor.spin_once(timeout_sec=0.1)
        if node.trigger_activate() is TransitionCallbackReturn.SUCCESS:
            return True
    return ending.is_set()


if __name__ == "__main__":
    raise SystemExit(main())
