"""The ROS 2 node: an ordinary lifecycle node around ``ControlLoop``, the same on an apt install and on the wheels.

    inactive: connected, watching, commanding nothing         active: commanding every tick, holding when in doubt

Activation begins an episode. ``~/end_episode`` says how it went; the arm brakes, then nothing is commanded, so the
scene can be set up anew and the policy server may hand over another policy, until ``~/begin_episode``. ``~/stop``
latches a protective hold (announced on ``~/stopped``), ``~/release`` undoes it; ``~/pause`` and ``~/resume`` hold and
go on. Deactivation and SIGTERM brake to rest first. The stop is software: it is not an emergency stop.
"""

from __future__ import annotations

import argparse
import signal
import threading
import time
from pathlib import Path

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy._rclpy_pybind11 import RCLError
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import Bool
from std_srvs.srv import SetBool, Trigger

from episodes.schema import EpisodeError
from real_robot.control.embodiment import embodiment_of
from real_robot.control.loop import ControlLoop
from real_robot.control.thread import ControlThread
from real_robot.priority import take_priority
from real_robot.recorder import Recorder
from real_robot.robot_file import Robot, load_robot
from real_robot.ros.ros_io import LATCHED_QOS, CameraInput, CommandOutput, FrameInput, JointInput
from real_robot.serving.client import PolicyClient
from real_robot.serving.protocol import Hello, Outcome
from real_robot.serving.remote_policy import RemotePolicy

PRIORITY = 40
# read on configuration
_CONNECTIONS = {
    "robot_file": "YAML file of the robot: limits, control, ros",
    "policy_url": "WebSocket address of the policy server",
    "token_file": "file that holds the policy server's token",
    "store": "episode store that every episode goes into; empty: nothing is recorded",
}
# read when an episode begins
_EPISODE = {
    "instruction": "what the policy is asked to do",
    "task": "name of the task that the episode is recorded under; empty: the instruction",
}


class PolicyNode(LifecycleNode):
    """See the module. One control thread, one executor thread; ``ControlThread.lock`` guards the loop between them."""

    def __init__(self) -> None:
        super().__init__("vla_rl_policy")
        for name, description in (_CONNECTIONS | _EPISODE).items():
            self.declare_parameter(name, "", ParameterDescriptor(description=description))
        seeds = IntegerRange(from_value=0, to_value=2**63 - 1, step=1)
        self.declare_parameter(
            "seed", 0, ParameterDescriptor(description="recorded with the episode", integer_range=[seeds])
        )
        self.add_on_set_parameters_callback(self._on_parameters)
        self._robot: Robot | None = None
        self._client: PolicyClient | None = None
        self._recorder: Recorder | None = None
        self._policy: RemotePolicy | None = None
        self._control: ControlThread | None = None
        self._frames: FrameInput | None = None
        self._stop_reason = ""
        self._announced: bool | None = None
        self._in_episode = False
        self._ending: Outcome | None = None
        self._stopped = self.create_publisher(Bool, "~/stopped", LATCHED_QOS)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self._services_kept = [
            self.create_service(Trigger, f"~/{name}", getattr(self, f"_on_{name}"))
            for name in ("stop", "release", "pause", "resume", "begin_episode")
        ]
        self._services_kept.append(self.create_service(SetBool, "~/end_episode", self._on_end_episode))
        self._timer = self.create_timer(0.5, self._diagnose)

    # Lifecycle

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        try:
            robot = load_robot(Path(self._text("robot_file")))
            token = Path(self._text("token_file")).read_text().strip()
            self._recorder = Recorder(Path(self._text("store"))) if self._text("store") else None
            self._frames = FrameInput(self) if robot.ros.tool_frame else None
            output = CommandOutput(self, robot.ros, robot.limits)  # last: nothing closes it when something fails here
        except (ValueError, OSError, EpisodeError) as error:
            self.get_logger().error(f"cannot configure: {error}")
            self.release_wires()
            return TransitionCallbackReturn.FAILURE
        self._robot, self._output = robot, output
        self._joints = JointInput(self, robot.ros, [axis.name for axis in robot.limits.axes])
        self._cameras = CameraInput(self, robot.ros.cameras)
        self._client = PolicyClient(self._text("policy_url"), token=token, timeout_s=robot.control.server_timeout_s)
        return TransitionCallbackReturn.SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        self._policy = self._control = None
        try:
            if self._frames is not None:
                assert self._robot is not None
                self._frames.check(self._robot, self._joints)
            self._begin()
        except ValueError as error:
            self.get_logger().error(f"cannot activate: {error}")
            return TransitionCallbackReturn.FAILURE
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
        """Brake to rest and end the control thread and the episode. Returns when the arm is commanded still."""
        if self._control is not None and self._control.running:
            self._ending = self._ending or ("unknown" if self._in_episode else None)
            self._control.brake()
            self._close_episode()

    def release_wires(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None
        if self._frames is not None:
            self._frames.close()
            self._frames = None
        for wire in (self._joints, self._cameras, self._output) if self._robot is not None else ():
            wire.close()
        self._robot = None

    # Episodes

    def _begin(self) -> None:
        """Begin an episode from rest, with the policy that the server now offers. ValueError says why it cannot."""
        assert self._robot is not None
        assert self._client is not None
        hello = self._client.hello
        if self._in_episode:
            raise ValueError("an episode is under way; call ~/end_episode first")
        if self._stop_reason:
            raise ValueError(f"stopped: {self._stop_reason}; call ~/release first")
        if hello is None:
            raise ValueError(f"no policy server: {self._client.trouble}")
        control = self._prepare(self._robot, self._client, hello)
        assert self._policy is not None
        instruction = self._text("instruction")
        with control.lock:
            self._policy.begin(instruction)
        control.start()
        if self._recorder is not None:
            self._recorder.begin(
                instruction=instruction,
                task=self._text("task") or instruction,
                seed=int(self.get_parameter("seed").value or 0),
                control_hz=hello.control_hz,
                policy_version=hello.fingerprint,
                world={"robot": Path(self._text("robot_file")).stem},
            )
        self._in_episode = True
        with control.lock:
            control.loop.resume()

    def _prepare(self, robot: Robot, client: PolicyClient, hello: Hello) -> ControlThread:
        """The control thread with a source of actions for this very policy."""
        if self._control is not None and self._policy is not None and self._policy.hello == hello:
            return self._control
        if missing := set(hello.cameras) ^ set(robot.ros.cameras):
            raise ValueError(f"policy and robot file disagree about the cameras {sorted(missing)}")
        embodiment = embodiment_of(robot, hello.control_hz)
        policy = RemotePolicy(
            hello,
            robot.control.chunking,
            embodiment=embodiment,
            oracle=client,
            eyes=self._cameras,
            journal=self._recorder,
            max_image_age_s=robot.control.max_image_age_s,
        )
        if self._control is None:
            loop = ControlLoop(robot.limits, control_hz=hello.control_hz, embodiment=embodiment, source=policy)
            self._control = ControlThread(loop, self._joints, self._output, afterwards=self._afterwards)
        elif self._policy is not None and self._policy.hello.control_hz != hello.control_hz:
            raise ValueError(f"the new policy runs at {hello.control_hz:g} Hz; deactivate and activate to change over")
        else:
            with self._control.lock:
                self._control.loop.source = policy
        self._policy = policy
        return self._control

    def _afterwards(self, now_s: float) -> None:
        """In the control thread, when the tick's command has left."""
        assert self._policy is not None
        assert self._control is not None
        self._policy.ask(now_s)
        held = self._control.loop.filter
        if held.stopped:
            self._stop_reason = self._stop_reason or held.stopped
        self._announce()
        if self._ending is not None and held.at_rest:
            measured = self._joints.measure()
            if measured is not None:
                self._policy.look_last(measured, now_s)
            self._close_episode()

    def _close_episode(self) -> None:
        outcome, self._ending = self._ending, None
        if outcome is None:
            return
        if self._recorder is not None:
            self._recorder.end(success=outcome == "success")
        if self._client is not None:
            self._client.end_episode(outcome)
        self._in_episode = False

    def _on_begin_episode(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success, response.message = True, ""
        try:
            if self._control is None or not self._control.running:
                raise ValueError("the node is not active")
            self._begin()
        except ValueError as error:
            response.success, response.message = False, str(error)
        return response

    def _on_end_episode(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        """``data``: whether the task was achieved. Answers at once; the arm brakes, and then the episode is closed."""
        response.success, response.message = self._in_episode and self._control is not None, ""
        if not response.success or self._control is None:
            response.message = "no episode is under way"
            return response
        self._ending = "success" if request.data else "failure"
        self._control.rest()
        return response

    # Stop and pause

    def _on_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._stop_reason = "the stop service was called"
        if self._control is not None:
            with self._control.lock:
                self._control.loop.stop(self._stop_reason)
        self._announce()
        response.success, response.message = True, "braking; protective hold is latched until ~/release"
        return response

    def _on_release(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success, response.message = True, "released"
        try:
            if self._control is not None:
                with self._control.lock:
                    self._control.loop.filter.release()
            self._stop_reason = ""
        except ValueError as error:
            response.success, response.message = False, str(error)
        self._announce()
        return response

    def _announce(self) -> None:
        stopped = bool(self._stop_reason)
        if stopped != self._announced:
            self._announced = stopped
            self._stopped.publish(Bool(data=stopped))

    def _on_pause(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        return self._with_loop("pause", response)

    def _on_resume(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        return self._with_loop("resume", response)

    def _with_loop(self, what: str, response: Trigger.Response) -> Trigger.Response:
        response.success = self._in_episode and self._ending is None
        response.message = "" if response.success else "no episode is under way"
        if response.success and self._control is not None:
            with self._control.lock:
                getattr(self._control.loop, what)()
        return response

    # What others may know and set

    def _text(self, name: str) -> str:
        return str(self.get_parameter(name).value)

    def _on_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        for parameter in parameters:
            reason = ""
            if parameter.name in _CONNECTIONS and self._robot is not None:
                reason = f"{parameter.name} is read on configuration; deactivate and clean up first"
            if reason:
                return SetParametersResult(successful=False, reason=reason)
            if parameter.name == "instruction" and self._policy is not None:
                self._policy.instruction = parameter.value
        return SetParametersResult(successful=True)

    def _diagnose(self) -> None:
        status = DiagnosticStatus(name=f"{self.get_name()}: control", hardware_id="")
        troubles = [f"stopped: {self._stop_reason}" if self._stop_reason else ""]
        if self._client is not None:
            troubles += [self._client.trouble, self._joints.trouble]
        if self._recorder is not None:
            troubles.append(self._recorder.trouble)
        values: dict[str, object] = {"in_episode": self._in_episode}
        if self._control is not None and self._policy is not None:
            troubles.append(self._policy.trouble)
            loop = self._control.loop
            values |= vars(loop.counters) | vars(self._policy.counters) | self._control.timings.summary()
            running = self._control.running
            values |= {"active": running, "at_rest": not running or loop.filter.at_rest}
            values |= {"real_time": self._control.real_time, "policy": self._policy.hello.fingerprint}
        if self._recorder is not None:
            values["recorded"] = self._recorder.recorded
        status.values = [KeyValue(key=key, value=str(value)) for key, value in values.items()]
        status.message = "; ".join(trouble for trouble in troubles if trouble) or "ok"
        status.level = DiagnosticStatus.OK if status.message == "ok" else DiagnosticStatus.WARN
        array = DiagnosticArray(status=[status])
        array.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(array)


def main(arguments: list[str] | None = None, *, autostart_s: float = 0.0) -> int:
    """Spin until SIGINT or SIGTERM, then brake, hold, and end with 0.

    ``autostart_s``: configure and activate by itself, trying for so long; 1 if it cannot. 0 leaves both to others.
    """
    take_priority(PRIORITY)  # before the middleware starts its threads, so that they have it too
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
    parser = argparse.ArgumentParser(description="everything after --ros-args is ROS's own")
    parser.add_argument("--autostart", type=float, default=0.0, metavar="SECONDS")
    own, others = parser.parse_known_args()
    raise SystemExit(main(others, autostart_s=own.autostart))
