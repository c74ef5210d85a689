"""The ROS 2 lifecycle node of one arm, the same on an apt install and on the wheels.

    inactive: connected, measuring, commanding nothing      active: commanding every tick, holding when in doubt

Activation begins an episode. ``~/end_episode`` reports its result; the arm brakes, then nothing is commanded, so that
the scene can be set up again and the policy server may change the policy, until ``~/begin_episode``. ``~/stop`` latches
a protective hold (published on ``~/stopped``); ``~/release`` undoes it, and only ``~/resume`` lets the arm move again,
slowly at first. ``~/pause`` holds until ``~/resume``. The parameter ``speed`` lowers every joint's speed.
Deactivation, SIGTERM and SIGHUP brake to rest first. The stop is software: it is not an emergency stop.
"""

from __future__ import annotations

import argparse
import secrets
import signal
import threading
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import rclpy
from diagnostic_msgs.msg import DiagnosticArray, DiagnosticStatus, KeyValue
from rcl_interfaces.msg import FloatingPointRange, IntegerRange, ParameterDescriptor, SetParametersResult
from rclpy._rclpy_pybind11 import RCLError
from rclpy.clock import Clock, ClockType
from rclpy.executors import ExternalShutdownException, SingleThreadedExecutor
from rclpy.lifecycle import LifecycleNode, LifecycleState, TransitionCallbackReturn
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import Bool
from std_srvs.srv import SetBool, Trigger

from episodes.schema import EpisodeError
from real_robot.priority import take_priority
from real_robot.ros.episode_runner import Connections, EpisodeRequest, EpisodeRunner
from real_robot.ros.messages import LATCHED_QOS
from real_robot.ros.services import BRAKING, RELEASED, answering

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
    """Parameters, services, lifecycle and diagnostics around an ``EpisodeRunner``, which exists while configured."""

    def __init__(self) -> None:
        super().__init__("vla_rl_policy")
        for name, description in (_CONNECTIONS | _EPISODE).items():
            self.declare_parameter(name, "", ParameterDescriptor(description=description))
        seeds = IntegerRange(from_value=0, to_value=2**63 - 1, step=1)
        what = "of the start that is set up, recorded with the episode; 0: another one for every episode"
        self.declare_parameter("seed", 0, ParameterDescriptor(description=what, integer_range=[seeds]))
        shares = FloatingPointRange(from_value=0.05, to_value=1.0, step=0.0)
        self.declare_parameter(
            "speed", 1.0, ParameterDescriptor(description="share of every joint's speed", floating_point_range=[shares])
        )
        self.add_on_set_parameters_callback(self._on_parameters)
        self._runner: EpisodeRunner | None = None
        self._stopping = threading.Lock()  # guards what follows, and that it agrees with the filter's stop
        self._stop_reason = ""
        self._published_stop: bool | None = None
        self._stopped = self.create_publisher(Bool, "~/stopped", LATCHED_QOS)
        self._diagnostics = self.create_publisher(DiagnosticArray, "/diagnostics", 10)
        self._services_kept = [
            self.create_service(Trigger, f"~/{name}", getattr(self, f"_on_{name}"))
            for name in ("stop", "release", "pause", "resume", "begin_episode")
        ]
        self._services_kept.append(self.create_service(SetBool, "~/end_episode", self._on_end_episode))
        steady = Clock(clock_type=ClockType.STEADY_TIME)  # the ROS clock may stand still
        self._timer = self.create_timer(0.5, self._publish_diagnostics, clock=steady)

    # -- lifecycle -------------------------------------------------------------------------------------------------

    def on_configure(self, state: LifecycleState) -> TransitionCallbackReturn:
        connections = Connections(
            robot_file=Path(self._text("robot_file")),
            policy_url=self._text("policy_url"),
            token_file=Path(self._text("token_file")),
            store=Path(self._text("store")) if self._text("store") else None,
        )
        try:
            self._runner = EpisodeRunner(self, connections, on_tick=self._on_tick)
            self._runner.set_speed(float(self.get_parameter("speed").value or 1.0))
        except (ValueError, OSError, EpisodeError) as error:
            self.get_logger().error(f"cannot configure: {error}")
            return TransitionCallbackReturn.FAILURE
        return TransitionCallbackReturn.SUCCESS

    def on_activate(self, state: LifecycleState) -> TransitionCallbackReturn:
        assert self._runner is not None
        try:
            self._refuse_while_stopped()
            self._runner.activate(self._episode())
        except ValueError as error:
            self.get_logger().error(f"cannot activate: {error}")
            return TransitionCallbackReturn.FAILURE
        except Exception as error:  # rclpy calls ``on_error`` then, without saying why
            self.fail(error)
            raise
        return super().on_activate(state)

    def on_deactivate(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.brake()
        return super().on_deactivate(state)

    def on_cleanup(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.disconnect()
        return TransitionCallbackReturn.SUCCESS

    def on_shutdown(self, state: LifecycleState) -> TransitionCallbackReturn:
        self.brake()
        self.disconnect()
        return TransitionCallbackReturn.SUCCESS

    def on_error(self, state: LifecycleState) -> TransitionCallbackReturn:
        """After an error of a transition, which rclpy does not show: the arm brakes, and the node is unconfigured."""
        self.get_logger().error("a transition failed: the arm brakes; correct what it needs, and configure again")
        self.brake()
        self.disconnect()
        return TransitionCallbackReturn.SUCCESS

    def brake(self) -> None:
        """Brake to rest and end the episode. Returns when the commanded speed is zero."""
        if self._runner is not None:
            self._runner.brake()

    def fail(self, error: Exception) -> None:
        """After an error of a callback: the stop is latched, and the episode under way ends. Returns at once."""
        traceback.print_exception(error)
        reason = f"a callback of the node failed: {type(error).__name__}: {error}"
        self.get_logger().error(f"{reason}; the arm brakes and holds until ~/release")
        with self._stopping:
            self._stop_reason = self._stop_reason or reason
            if self._runner is not None:
                self._runner.abort(self._stop_reason)
            self._publish_stop()

    def disconnect(self) -> None:
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    # -- episodes --------------------------------------------------------------------------------------------------

    def _episode(self) -> EpisodeRequest:
        """ValueError without an instruction."""
        if not self._text("instruction").strip():
            raise ValueError(f"no instruction; ros2 param set /{self.get_name()} instruction TEXT")
        seed = int(self.get_parameter("seed").value or 0) or secrets.randbits(32)
        return EpisodeRequest(instruction=self._text("instruction"), task=self._text("task"), seed=seed)

    def _refuse_while_stopped(self) -> None:
        if self._stop_reason:
            raise ValueError(f"stopped: {self._stop_reason}; call ~/release first")

    def _on_begin_episode(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        with answering(response):
            if self._runner is None:
                raise ValueError("the node is not active")
            self._refuse_while_stopped()
            self._runner.begin_episode(self._episode())
        return response

    def _on_end_episode(self, request: SetBool.Request, response: SetBool.Response) -> SetBool.Response:
        """``data``: whether the task was achieved. Answers at once; the arm brakes, and then the episode is closed."""
        with answering(response):
            if self._runner is None:
                raise ValueError("no episode is under way")
            self._runner.end_episode("success" if request.data else "failure")
        return response

    # -- stop and pause --------------------------------------------------------------------------------------------

    def _on_tick(self) -> None:
        """In the control thread."""
        with self._stopping:
            of_filter = "" if self._runner is None else self._runner.stop_reason
            self._stop_reason = self._stop_reason or of_filter
            self._publish_stop()

    def _on_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        with self._stopping:
            self._stop_reason = "the stop service was called"
            if self._runner is not None:
                self._runner.stop(self._stop_reason)
            self._publish_stop()
        response.success, response.message = True, BRAKING
        return response

    def _on_release(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        with self._stopping, answering(response, RELEASED):
            if self._runner is not None:
                self._runner.release()
            self._stop_reason = ""
            self._publish_stop()
        return response

    def _publish_stop(self) -> None:
        """When it changed."""
        stopped = bool(self._stop_reason)
        if stopped != self._published_stop:
            self._published_stop = stopped
            self._stopped.publish(Bool(data=stopped))

    def _on_pause(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        return self._set_paused(True, response)

    def _on_resume(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        return self._set_paused(False, response)

    def _set_paused(self, paused: bool, response: Trigger.Response) -> Trigger.Response:
        with answering(response):
            if self._runner is None:
                raise ValueError("no episode is under way")
            self._runner.set_paused(paused)
        return response

    # -- parameters and diagnostics --------------------------------------------------------------------------------

    def _text(self, name: str) -> str:
        return str(self.get_parameter(name).value)

    def _on_parameters(self, parameters: list[Parameter]) -> SetParametersResult:
        for parameter in parameters:
            if parameter.name in _CONNECTIONS and self._runner is not None:
                reason = f"{parameter.name} is read on configuration; deactivate and clean up first"
                return SetParametersResult(successful=False, reason=reason)
            if parameter.name == "speed" and self._runner is not None:
                self._runner.set_speed(parameter.value)
            if parameter.name == "instruction" and self._runner is not None:
                try:
                    self._runner.set_instruction(parameter.value)
                except ValueError as error:
                    return SetParametersResult(successful=False, reason=str(error))
        return SetParametersResult(successful=True)

    def _publish_diagnostics(self) -> None:
        runner = self._runner
        status = DiagnosticStatus(name=f"{self.get_name()}: control", hardware_id="")
        problems = [f"stopped: {self._stop_reason}" if self._stop_reason else ""]
        values: dict[str, object] = {"in_episode": runner is not None and runner.in_episode}
        if runner is not None:
            problems += runner.problems()
            values |= runner.values()
        status.values = [KeyValue(key=key, value=str(value)) for key, value in values.items()]
        status.message = "; ".join(problem for problem in problems if problem) or "ok"
        level = DiagnosticStatus.ERROR if self._stop_reason else DiagnosticStatus.WARN
        status.level = DiagnosticStatus.OK if status.message == "ok" else level
        array = DiagnosticArray(status=[status])
        array.header.stamp = self.get_clock().now().to_msg()
        self._diagnostics.publish(array)


def main(arguments: list[str] | None = None, *, autostart_s: float = 0.0) -> int:
    """Spin until SIGINT, SIGTERM or SIGHUP, then brake, hold, and end with 0.

    ``autostart_s``: configure and activate without being asked, trying for so long; 1 if that fails. 0: wait.
    """
    take_priority(PRIORITY)  # before the middleware starts its threads, which inherit it
    rclpy.init(args=arguments, signal_handler_options=SignalHandlerOptions.NO)
    ending = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:  # ignored under nohup
            signal.signal(number, lambda *_: ending.set())
    with ExitStack() as stack:  # whatever ends it, the arm is braked first
        stack.callback(rclpy.try_shutdown)
        node = PolicyNode()
        stack.callback(node.destroy_node)
        executor = SingleThreadedExecutor()
        stack.callback(executor.shutdown, timeout_sec=2.0)
        stack.callback(node.disconnect)
        stack.callback(node.brake)
        executor.add_node(node)
        started = not autostart_s or _start(node, executor, ending, time.monotonic() + autostart_s)
        while started and not ending.is_set():
            _spin_once(node, executor, ending)
    return 0 if started else 1


def _spin_once(node: PolicyNode, executor: SingleThreadedExecutor, ending: threading.Event) -> None:
    """At most one callback. Its error stops the arm; others are called all the same, as one of them may be a stop."""
    try:
        executor.spin_once(timeout_sec=0.1)
    except ExternalShutdownException:
        ending.set()
    except RCLError as error:  # a transition that is not allowed now: rclpy does not catch it
        node.get_logger().error(f"refused: {error}")
    except Exception as error:
        node.fail(error)


def _start(node: PolicyNode, executor: SingleThreadedExecutor, ending: threading.Event, until_s: float) -> bool:
    """Configure, then activate as soon as joints, cameras and policy server are there."""
    if node.trigger_configure() is not TransitionCallbackReturn.SUCCESS:
        return False
    while time.monotonic() < until_s and not ending.is_set():
        retry_s = time.monotonic() + 0.5
        while time.monotonic() < retry_s and not ending.is_set():
            _spin_once(node, executor, ending)
        if node.trigger_activate() is TransitionCallbackReturn.SUCCESS:
            return True
    return ending.is_set()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="everything after --ros-args is ROS's own")
    parser.add_argument("--autostart", type=float, default=0.0, metavar="SECONDS")
    own, others = parser.parse_known_args()
    raise SystemExit(main(others, autostart_s=own.autostart))
