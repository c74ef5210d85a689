"""The robot as an environment: one arm in real time behind the interface of the simulators.

Evaluation and learning on the arm use the code that they use in simulation. ``step`` hands an action to the control
thread and returns when it is taken, so the actions of a chunk follow each other without a gap. While nobody steps
(policy inference, an update) the arm brakes and holds.

    action_delay 0   | chunk, executed | observe: at rest | chunk ...      ``observe`` waits for the last action
    action_delay d   | chunk, executed ........| chunk ...                 the policy has d control steps
                             observe |<-- d -->|                           less the lead of the commands

Episodes come from the robot file's ``episode_node``, which sets up a (task, seed) and publishes success and failure.
``~/stop`` of the node ``vla_rl_env`` latches a protective hold; ``~/release`` and ``~/resume`` let the arm move again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Float32
from numpy.typing import NDArray
from torch import Tensor

from real_robot.control.stepped_source import SteppedSource
from real_robot.control.thread import ControlThread
from real_robot.images import UnreadableImages, observation_of
from real_robot.robot_file import RobotError, load_robot
from real_robot.ros.installation import require_ros
from real_robot.waiting import POLL_S, wait_until_ready
from sims.numbers.ranges import Count, ImageSize, PositiveFloat, PositiveInt, SomeNames
from sims.vector_env import CannotCapture, EnvSpec, Observation, StartState, Step


@dataclass(frozen=True, kw_only=True)
class RobotConfig:
    """``file``: YAML file of the robot. ``tasks``: names that its ``ros.episode_node`` knows.

    ``image_size``: (height, width) of observations. ``control_hz``: rate of actions; the robot file's command rate is a
    multiple of it. ``timeout_s``: an action that is not taken, or an observation that does not arrive, within this time
    is a failure. ``reset_timeout_s``: the same for setting up an episode, which may need people. ``action_delay``:
    control steps from an observation to the execution of the first action that is chosen by it, as in the simulator
    that the policy was trained in; more than the robot file's ``command_lead`` takes.
    """

    name: Literal["robot"] = "robot"
    file: Path
    tasks: SomeNames
    num_envs: Literal[1] = 1
    image_size: ImageSize = (64, 64)
    control_hz: PositiveFloat = 20.0
    max_steps: PositiveInt = 100
    timeout_s: PositiveFloat = 10.0
    reset_timeout_s: PositiveFloat = 600.0
    action_delay: Count = 0


class RobotEnv:
    """One environment. Its episodes start from (task, seed) only: ``capture`` raises CannotCapture.

    RobotError for a robot file, ROS installation or robot that cannot be used; also from ``reset`` and ``observe`` if
    the episode node, the joints or the cameras do not answer.
    """

    def __init__(self, config: RobotConfig) -> None:
        try:
            self._robot = robot = load_robot(config.file)
            self._embodiment = robot.embodiment()
            robot.check_delay(config.action_delay, config.control_hz)
            # one is being taken, and those of the lead are sent
            self._may_wait = max(0, config.action_delay - round(robot.lead_steps(config.control_hz)) - 1)
            self._actions = SteppedSource(waiting=self._may_wait)
            loop = robot.control_loop(self._actions, self._embodiment, control_hz=config.control_hz)
        except (ValueError, OSError) as error:
            raise RobotError(str(error)) from error
        if not robot.ros.episode_node:
            raise RobotError(f"{config.file}: ros.episode_node is missing; name the node that sets up episodes")
        self.config = config
        self.spec = EnvSpec(
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
            fingerprint={"robot": config.file.stem},
            can_capture=False,
            action_delay=config.action_delay,
        )
        require_ros()
        from real_robot.ros.connection import EpisodeService, RobotConnection

        self._connection = RobotConnection(robot)
        self._episodes = EpisodeService(self._connection.node, robot.ros.episode_node, timeout_s=config.timeout_s)
        self._control = self._connection.connect(loop)
        self._started = False
        self._instruction = ""
        self._elapsed = 0
        self._moving = False
        self._observation: Observation | None = None
        self._observed_at_rest = False
        self._result = {"terminated": True, "truncated": False, "success": False, "valid": True}

    @property
    def control(self) -> ControlThread:
        """What drives the arm: its counters and timings."""
        return self._control

    # -- VectorEnv -------------------------------------------------------------------------------------------------

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """Brake, have the episode set up, and start where the arm then is. Waits for people if the setup needs them."""
        if len(start) != (1 if env_ids is None else len(env_ids)):
            raise ValueError(f"reset: {len(start)} start states; give one for each environment")
        if not start:
            return
        state = start[0]
        if state.snapshot is not None:
            raise CannotCapture(_NO_SNAPSHOT)
        if not 0 <= state.task < len(self.spec.tasks):
            raise ValueError(f"reset: task {state.task} is not in 0..{len(self.spec.tasks) - 1} ({self.spec.tasks})")
        self._hold()
        self._instruction = self._episodes.reset(
            self.spec.tasks[state.task], state.seed, timeout_s=self.config.reset_timeout_s
        )
        self._wait_for_joints()
        try:
            self.control.start()
        except ValueError as error:
            raise RobotError(f"the arm cannot start: {error}") from error
        self._wait(self._at_rest, lambda: "the arm was not taken up")
        self._started, self._elapsed, self._moving, self._observation = True, 0, False, None
        self._result = {"terminated": False, "truncated": False, "success": False, "valid": True}

    def step(self, action: Float[Tensor, "1 A"]) -> Step:
        """Returns when the action is taken, one control period before its effect is measured; the last action of an
        episode when it has been executed. ``valid`` is False if it was not taken: the arm is stopped, or its joints are
        unknown.
        """
        if not self._started:
            raise RobotError("step: reset() comes first")
        reward = 0.0
        if not self._done:
            self._observation = None
            self._moving = taken = self._take(action[0].float().numpy())
            self._elapsed += 1
            timed_out = self._elapsed >= self.spec.max_steps
            if timed_out and taken:
                self._settle()
            success, failure = self._episodes.success, self._episodes.failure
            self._result = {
                "terminated": taken and (success or failure),
                "truncated": not taken or (timed_out and not (success or failure)),
                "success": taken and success,
                "valid": taken,
            }
            reward = float(taken and success)
            if self._done:
                self._hold()
        flags = {name: torch.tensor([value]) for name, value in self._result.items()}
        return Step(reward=torch.tensor([reward]), intervened=torch.zeros(1, dtype=torch.bool), **flags)

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """The observation after the last action has been executed, or ``action_delay`` control steps before that; the
        same again until the next action, or until the arm has come to rest since: the next action begins there.
        """
        if not self._started:
            raise RobotError("observe: reset() comes first")
        if not self.config.action_delay:
            self._settle()
        at_rest = self._at_rest()
        if self._observation is None or (at_rest and not self._observed_at_rest):
            moving, self._observed_at_rest = self._moving and not at_rest, at_rest
            max_age_s = self._robot.control.max_image_age_s
            self._observation = self._observe(max_image_age_s=max_age_s if moving else 0.0)
        return self._observation[[0] if env_ids is None else list(env_ids)].map(torch.clone)

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        raise CannotCapture(_NO_SNAPSHOT)

    def close(self) -> None:
        """Brake, hold, and leave ROS."""
        self._connection.close()

    # -- the arm ---------------------------------------------------------------------------------------------------

    @property
    def _done(self) -> bool:
        return self._result["terminated"] or self._result["truncated"]

    def _take(self, action: Float32[np.ndarray, " A"]) -> bool:
        """Whether the arm takes the action, after a pause of its measurements too: the loop then drops what waits, and
        goes on by itself; an action would be too old when the arm has been taken up. Not so where earlier actions,
        which are recorded already, may have been dropped with it.
        """
        until_s = time.monotonic() + self.config.timeout_s
        while self.control.loop.mode == "running" and (left_s := until_s - time.monotonic()) > 0.0:
            if not self._taken_up():
                time.sleep(POLL_S)
                continue
            if self._actions.put(action, left_s):
                return True
            if self._may_wait:
                break
        return False

    def _taken_up(self) -> bool:
        with self.control.lock:
            return not self.control.loop.live or self.control.loop.filter.taken_up

    def _at_rest(self) -> bool:
        with self.control.lock:
            return self.control.loop.filter.at_rest

    def _settle(self) -> None:
        """Wait until the action under way is executed; then the arm brakes."""
        if self._moving:
            if self.control.loop.mode == "running":
                self._actions.finish(self.config.timeout_s)
            time.sleep(self._robot.lead_s)  # decided, but not yet executed
            self._moving = False

    def _hold(self) -> None:
        """Brake to rest, then command nothing."""
        if self.control.running:
            self._settle()
            self.control.rest()
            self._wait(lambda: not self.control.loop.live, lambda: "the arm does not come to rest")

    def _wait_for_joints(self) -> None:
        """Until joints are known that were measured after the setup.

        Joint states under way may be older than the setup: one is used only if even the oldest that counts as fresh
        was measured after it.
        """
        joints, max_age_s = self._connection.joints, self._robot.limits.max_measurement_age_s
        settled_s = time.monotonic() + max_age_s
        self._wait(lambda: joints.fresh(max_age_s) and joints.stamp_s >= settled_s, lambda: joints.problem)

    def _observe(self, *, max_image_age_s: float) -> Observation:
        """The newest images and joints; at age 0 newer than this call, to show the effect of the last action."""
        joints, cameras = self._connection.joints, self._connection.cameras
        asked_s, measured, problem = time.monotonic(), None, "no new image from some camera"
        images: dict[str, NDArray[np.uint8]] | None = None

        def arrived() -> bool:
            nonlocal measured, images, problem
            newest, measured = cameras.newest(), joints.measure()
            if measured is None or newest is None or newest[1] < asked_s - max_image_age_s:
                return False
            try:
                images, _ = cameras.images(self.spec.image_size) or (None, 0.0)
            except UnreadableImages as error:  # the next may be readable
                problem = str(error)
            return images is not None

        self._wait(arrived, lambda: joints.problem or problem)
        assert measured is not None
        assert images is not None
        seen = np.zeros((len(images), *self.spec.image_size, 3), np.uint8)
        for i, camera in enumerate(self.spec.cameras):
            seen[i] = images[camera]
        return observation_of(seen, self._embodiment.state(measured.positions), self._instruction)

    def _wait(self, condition: Callable[[], bool], problem: Callable[[], str]) -> None:
        wait_until_ready(condition, problem, within_s=self.config.timeout_s, what="the robot")


_NO_SNAPSHOT = "a robot cannot be captured or restored: its episodes start from a task and a seed only"
