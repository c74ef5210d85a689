"""The robot as a world: one episode, one arm, real time, behind the interface of every simulator.

Evaluation and learning on the arm use the code that they use in simulation. ``step`` hands an action to the control
thread and returns when it is taken up, so the actions of a chunk follow each other without a gap; ``observe`` waits
until the last one has been carried out. While nobody steps (a policy thinks, an update runs) the arm brakes and holds.

Episodes come from the robot file's ``scene``: a node that sets up what is asked for and says whether it was achieved.
``~/stop`` and ``~/release`` of the node ``vla_rl_world`` latch and undo a protective hold.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rclpy
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from rcl_interfaces.msg import Parameter as ParameterMessage
from rcl_interfaces.srv import SetParameters
from rclpy.context import Context
from rclpy.executors import SingleThreadedExecutor
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.signals import SignalHandlerOptions
from std_msgs.msg import Bool
from std_srvs.srv import Trigger
from torch import Tensor

from real_robot.control.embodiment import embodiment_of
from real_robot.control.loop import ControlLoop
from real_robot.control.thread import ControlThread
from real_robot.robot_file import Robot, load_robot
from real_robot.ros.ros_io import LATCHED_QOS, CameraInput, CommandOutput, JointInput
from real_robot.safety.filter import Measurement
from sims.errors import UserError
from sims.vector_env import EnvSpec, Observation, StartState, Step, encode_instructions


class RobotWorldError(UserError):
    """A robot that cannot be a world: no scene, no joints, no images, or what only a simulator can do."""


@dataclass(frozen=True, kw_only=True)
class RobotEnvConfig:
    """``patience_s``: an action that is not taken up, or a look that does not come, within this time is a failure."""

    robot_file: Path
    tasks: tuple[str, ...]
    image_size: tuple[int, int] = (64, 64)
    control_hz: float = 20.0
    max_steps: int = 100
    patience_s: float = 10.0
    reset_timeout_s: float = 600.0


class Mailbox:
    """The action source of a program: at most one action waits, none is repeated."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: NDArray[np.float32] | None = None
        self._taken = self._idle = 0

    def action(self, tick: int, measured: Measurement) -> NDArray[np.float32] | None:
        with self._changed:
            action, self._waiting = self._waiting, None
            self._taken += action is not None
            self._idle += action is None
            self._changed.notify_all()
        return action

    def forget(self) -> None:
        with self._changed:
            self._waiting = None

    def put(self, action: NDArray[np.float32], patience_s: float) -> bool:
        """Whether it was taken up in time; if not, it is withdrawn."""
        with self._changed:
            self._waiting, before = action, self._taken
            if self._changed.wait_for(lambda: self._taken > before, patience_s):
                return True
            self._waiting = None
            return False

    def finish(self, patience_s: float) -> bool:
        """Wait until what was taken up has been carried out: a control tick that found nothing."""
        with self._changed:
            before = self._idle
            return self._changed.wait_for(lambda: self._idle > before, patience_s)


class Scene:
    """The node that sets up episodes and judges them. ``call`` blocks; the executor runs in another thread."""

    def __init__(self, node: Node, name: str, patience_s: float) -> None:
        self._node, self._name, self._patience_s = node, name, patience_s
        self.success = self.failure = False
        self._parameters = node.create_client(SetParameters, f"{name}/set_parameters")
        self._reset = node.create_client(Trigger, f"{name}/reset")
        self._subscriptions = [
            node.create_subscription(Bool, f"{name}/success", self._on_success, LATCHED_QOS),
            node.create_subscription(Bool, f"{name}/failure", self._on_failure, LATCHED_QOS),
        ]

    def begin(self, task: str, seed: int, timeout_s: float) -> str:
        """Set up (task, seed); the instruction."""
        values = [Parameter("task", value=task), Parameter("seed", value=seed)]
        messages: list[ParameterMessage] = [value.to_parameter_msg() for value in values]
        for result in self._call(
            self._parameters, SetParameters.Request(parameters=messages), self._patience_s
        ).results:
            if not result.successful:
                raise RobotWorldError(f"the scene {self._name} refuses {task!r}, {seed}: {result.reason}")
        reply = self._call(self._reset, Trigger.Request(), timeout_s)
        if not reply.success:
            raise RobotWorldError(f"the scene {self._name} could not be set up: {reply.message}")
        self.success = self.failure = False
        return str(reply.message)

    def _call(self, client: Any, request: Any, timeout_s: float) -> Any:
        if not client.wait_for_service(timeout_sec=self._patience_s):
            raise RobotWorldError(f"no service {client.srv_name}; start the node {self._name}, or mend ros.scene")
        answered = threading.Event()
        future = client.call_async(request)
        future.add_done_callback(lambda _: answered.set())
        if not answered.wait(timeout_s):
            raise RobotWorldError(f"{client.srv_name} did not answer within {timeout_s:g} s")
        return future.result()

    def _on_success(self, message: Bool) -> None:
        self.success = message.data

    def _on_failure(self, message: Bool) -> None:
        self.failure = message.data


class RobotEnv:
    """One row. A world of its own ROS context, so that it works in any program that does not use ROS otherwise."""

    def __init__(self, config: RobotEnvConfig) -> None:
        try:
            self._robot = robot = load_robot(config.robot_file)
        except (ValueError, OSError) as error:
            raise RobotWorldError(str(error)) from error
        if not robot.ros.scene:
            raise RobotWorldError(f"{config.robot_file}: ros.scene is missing; name the node that sets up episodes")
        self.config = config
        self._embodiment = embodiment_of(robot, config.control_hz)
        self.spec = self._describe(robot, config)
        self._context = Context()
        rclpy.init(context=self._context, signal_handler_options=SignalHandlerOptions.NO)
        self._node = Node("vla_rl_world", context=self._context)
        self._joints = JointInput(self._node, robot.ros, [axis.name for axis in robot.limits.axes])
        self._cameras = CameraInput(self._node, robot.ros.cameras)
        self._scene = Scene(self._node, robot.ros.scene, config.patience_s)
        self._mailbox = Mailbox()
        loop = ControlLoop(
            robot.limits, control_hz=config.control_hz, embodiment=self._embodiment, source=self._mailbox
        )
        output = CommandOutput(self._node, robot.ros, robot.limits)
        self._control = ControlThread(loop, self._joints, output)
        self._services = [
            self._node.create_service(Trigger, f"~/{name}", getattr(self, f"_on_{name}"))
            for name in ("stop", "release")
        ]
        self._executor = SingleThreadedExecutor(context=self._context)
        self._executor.add_node(self._node)
        self._spinning = threading.Thread(target=self._executor.spin, name="ros", daemon=True)
        self._spinning.start()
        self._start: StartState | None = None
        self._instruction = ""
        self._elapsed = 0
        self._moving = False
        self._seen: Observation | None = None
        self._outcome = {"terminated": True, "truncated": False, "success": False, "valid": True}

    def _describe(self, robot: Robot, config: RobotEnvConfig) -> EnvSpec:
        return EnvSpec(
            name="robot",
            num_envs=1,
            action_dim=self._embodiment.action_dim,
            state_dim=self._embodiment.state_dim,
            cameras=tuple(robot.ros.cameras),
            image_size=config.image_size,
            control_hz=config.control_hz,
            max_steps=config.max_steps,
            tasks=config.tasks,
            device=torch.device("cpu"),
            fingerprint={"robot": config.robot_file.stem},
            can_capture=False,
        )

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """Brake, have the scene set up, and begin where the arm then is. Waits for people if the scene needs them."""
        if len(start) != (1 if env_ids is None else len(env_ids)):
            raise ValueError(f"reset: {len(start)} start states; give one for each row")
        if not start:
            return
        state = start[0]
        if state.snapshot is not None:
            raise RobotWorldError(_NO_SNAPSHOT)
        if not 0 <= state.task < len(self.spec.tasks):
            raise ValueError(f"reset: task {state.task} is not in 0..{len(self.spec.tasks) - 1} ({self.spec.tasks})")
        self._hold()
        self._instruction = self._scene.begin(self.spec.tasks[state.task], state.seed, self.config.reset_timeout_s)
        # Joint states still on their way may be those of before: one is believed once even the oldest that would pass
        # for fresh was taken in the new scene.
        max_age_s = self._robot.limits.max_measurement_age_s
        settled_s = time.monotonic() + max_age_s
        self._wait(
            lambda: self._joints.fresh(max_age_s) and self._joints.stamp_s >= settled_s, lambda: self._joints.trouble
        )
        try:
            self._control.start()
        except ValueError as error:
            raise RobotWorldError(f"the arm cannot start: {error}") from error
        self._control.loop.resume()
        self._start, self._elapsed, self._moving, self._seen = state, 0, False, None
        self._outcome = {"terminated": False, "truncated": False, "success": False, "valid": True}

    def step(self, action: Float[Tensor, "1 A"]) -> Step:
        """Returns when the action is taken up, one control period before its effect shows; the last of an episode
        when it is done. ``valid`` is False where it was not taken up: the arm is stopped, or its joints are unknown.
        """
        if self._start is None:
            raise RobotWorldError("step: reset() comes first")
        reward = 0.0
        if not self._done:
            self._seen = None
            self._moving = taken = self._mailbox.put(action[0].float().numpy(), self.config.patience_s)
            self._elapsed += 1
            timed_out = self._elapsed >= self.spec.max_steps
            if timed_out and taken:
                self._settle()
            success, failure = self._scene.success, self._scene.failure
            self._outcome = {
                "terminated": taken and (success or failure),
                "truncated": not taken or (timed_out and not (success or failure)),
                "success": taken and success,
                "valid": taken,
            }
            reward = float(taken and success)
            if self._done:
                self._hold()
        flags = {name: torch.tensor([value]) for name, value in self._outcome.items()}
        return Step(reward=torch.tensor([reward]), intervened=torch.zeros(1, dtype=torch.bool), **flags)

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """What is seen once the last action has been carried out; the same again until the next one."""
        rows = [0] if env_ids is None else list(env_ids)
        if self._start is None:
            raise RobotWorldError("observe: reset() comes first")
        if self._seen is None:
            self._settle()
            self._seen = self._look()
        return self._seen[rows].map(torch.clone)

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        raise RobotWorldError(_NO_SNAPSHOT)

    def close(self) -> None:
        """Brake, hold, and leave ROS."""
        self._control.brake()
        self._executor.shutdown()
        self._spinning.join()
        self._node.destroy_node()
        rclpy.shutdown(context=self._context)

    def _on_stop(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        with self._control.lock:
            self._control.loop.stop("the stop service was called")
        response.success, response.message = True, "braking; protective hold is latched until ~/release"
        return response

    def _on_release(self, request: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        response.success, response.message = True, "released"
        try:
            with self._control.lock:
                self._control.loop.filter.release()
        except ValueError as error:
            response.success, response.message = False, str(error)
        return response

    @property
    def control(self) -> ControlThread:
        """What drives the arm: its counters and timings."""
        return self._control

    @property
    def _done(self) -> bool:
        return self._outcome["terminated"] or self._outcome["truncated"]

    def _settle(self) -> None:
        """The action under way is carried out, and the arm brakes."""
        if self._moving:
            self._mailbox.finish(self.config.patience_s)
            self._moving = False

    def _hold(self) -> None:
        """At rest, and nothing more is taken up."""
        if self._control.running:
            self._settle()
            self._control.rest()
            self._wait(lambda: self._control.loop.filter.at_rest, lambda: "the arm does not come to rest")

    def _look(self) -> Observation:
        """Newer than now, so that it shows what the last action did."""
        asked_s, measured = time.monotonic(), None

        def new() -> bool:
            nonlocal measured
            newest, measured = self._cameras.newest(), self._joints.measure()
            return measured is not None and newest is not None and newest[1] >= asked_s

        self._wait(new, lambda: self._joints.trouble or "no new image from some camera")
        seen = self._cameras.look(self.spec.image_size)
        assert seen is not None
        assert measured is not None
        images, _ = seen
        return Observation(
            images=torch.from_numpy(np.stack([images[camera] for camera in self.spec.cameras]))[None],
            state=torch.from_numpy(self._embodiment.state(measured.positions).copy())[None],
            instruction=encode_instructions([self._instruction]),
        )

    def _wait(self, condition: Callable[[], bool], trouble: Callable[[], str]) -> None:
        deadline = time.monotonic() + self.config.patience_s
        while not condition():
            if time.monotonic() > deadline:
                raise RobotWorldError(f"the robot is not there after {self.config.patience_s:g} s: {trouble()}")
            time.sleep(0.005)


_NO_SNAPSHOT = "a physical world cannot be captured or restored: its episodes start from a task and a seed only"
