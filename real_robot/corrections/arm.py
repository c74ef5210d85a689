"""An arm behind the interface of the simulators, for a person who watches, takes over, sets the scene up and labels.

Its time does not stand still. ``step`` hands an action to the control loop, which puts it through the safety filter,
and returns when it is taken, at a control tick; whoever is late lets the arm brake. ``observe`` never waits for the
arm: the first action that it chooses is the last but ``ahead``, or one that is still to come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor

from policies.policy import RobotSpec
from real_robot.arm_connection import ArmConnection
from real_robot.control.human_source import action_towards, position_dimensions
from real_robot.control.loop import Action
from real_robot.control.stepped_source import SteppedSource
from real_robot.images import images_problem, observation_of
from real_robot.robot_file import Robot, RobotError
from real_robot.safety.commands import Measurement
from real_robot.waiting import wait_until_ready
from sims.vector_env import CannotCapture, EnvSpec, Observation, StartState, Step

READY_S = 10.0  # for the first joints and images
TAKEN_PERIODS = 4  # an action that is not taken within so many control periods is withdrawn
SHOWN_S = 0.5  # for a frame of the arm at rest


class ArmEnv:
    """One environment, for a policy of ``policy``. RobotError if that is for another robot, or the arm is not ready.

    ``held``: action dimensions that keep their value; the others must be motions. ``max_steps``: of an episode.
    ``real_time``: its time does not stand still, so that its scene may change while nobody moves it.
    """

    real_time = True

    def __init__(
        self,
        robot: Robot,
        connection: ArmConnection,
        policy: RobotSpec,
        *,
        name: str,
        instruction: str,
        max_steps: int,
        held: Sequence[int],
    ) -> None:
        self._robot, self._connection, self._instruction = robot, connection, instruction
        self._actions = ExecutedActions()
        try:
            robot.check_delay(policy.action_delay, policy.control_hz)
            self._embodiment = robot.embodiment()
            loop = robot.control_loop(self._actions, self._embodiment, control_hz=policy.control_hz)
        except ValueError as error:
            raise RobotError(str(error)) from error
        cameras = tuple(robot.cameras)
        self.spec = EnvSpec(
            name="robot",
            num_envs=1,
            action_dim=self._embodiment.action_dim,
            state_dim=self._embodiment.state_dim,
            cameras=policy.cameras if set(policy.cameras) == set(cameras) else cameras,
            image_size=policy.image_size,
            control_hz=policy.control_hz,
            max_steps=max_steps,
            tasks=(instruction,),
            device=torch.device("cpu"),
            fingerprint={"robot": name},
            can_capture=False,
            action_delay=policy.action_delay,
        )
        if difference := policy.differences(RobotSpec.of(self.spec)):
            raise RobotError(f"the policy was made for another robot: {difference}")
        if not cameras:
            raise RobotError("the robot file names no camera; a person cannot correct what cannot be seen")
        self._control = connection.connect(loop)
        self._taken: deque[float] = deque(maxlen=64)  # when the last actions were taken
        self._elapsed, self._begun, self.ahead = 0, False, 0
        self._delay = policy.action_delay
        try:
            wait_until_ready(lambda: not self._sensors_problem(), self._sensors_problem, within_s=READY_S)
            self._check_motions(held)
        except RobotError:
            connection.close()
            raise

    # -- VectorEnv -------------------------------------------------------------------------------------------------

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """An episode begins where the arm is. RobotError says why it cannot."""
        if start[0].snapshot is not None:
            raise CannotCapture(_NO_SNAPSHOT)
        self.rest()
        self._actions.forget()
        try:
            self._control.start()
        except ValueError as error:
            raise RobotError(f"the arm cannot start: {error}") from error
        self._begun, self._elapsed = True, 0

    def step(self, action: Float[Tensor, "1 A"]) -> Step:
        """Returns when the action is taken. Not ``valid``: it was not, as the arm has stopped or starts anew."""
        taken = self._actions.put(action[0].float().numpy(), TAKEN_PERIODS / self.spec.control_hz)
        if taken:
            self._taken.append(time.monotonic())
            self._elapsed += 1
        no = torch.zeros(1, dtype=torch.bool)
        return Step(
            reward=torch.zeros(1),
            terminated=no,
            truncated=torch.tensor([self._elapsed >= self.spec.max_steps]),
            success=no,
            intervened=no,
            valid=torch.tensor([taken]),
        )

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """The newest images and joints. UnreadableImages if a camera sent what is none.

        ``ahead`` is then how many of the actions had not begun when it was taken, less the policy's ``action_delay``:
        below zero, so many more come before the first that it chooses. 0 at rest, when it can follow at once.
        """
        images, taken_s = self._images(self.spec.image_size)
        measured = self._connection.joints.measure()
        assert measured is not None
        under_way = sum(at_s + self._robot.lead_s > taken_s for at_s in self._taken)
        rests_s = self.taken_s + self._robot.lead_s + TAKEN_PERIODS / self.spec.control_hz
        self.ahead = under_way - self._delay if taken_s < rests_s else 0
        obs = observation_of(images, self._embodiment.state(measured.positions), self._instruction)
        return obs[[0] if env_ids is None else list(env_ids)]

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        raise CannotCapture(_NO_SNAPSHOT)

    def close(self) -> None:
        """Brake, hold, and leave the arm."""
        self._connection.close()

    # -- the arm ---------------------------------------------------------------------------------------------------

    @property
    def ask_steps(self) -> int:
        """So many control steps before a chunk ends, the next is to be observed for, to be as late after that as the
        policy's ``action_delay``: usually the action taken last and those of the lead have then not begun.
        """
        return max(0, self._delay - round(self._robot.lead_steps(self.spec.control_hz)) - 1)

    @property
    def taken_s(self) -> float:
        """When the last action was taken [s, monotonic]."""
        return self._taken[-1] if self._taken else 0.0

    @property
    def stopped(self) -> str:
        """Why the arm takes no actions before ``release``, or ""."""
        loop = self._control.loop
        resumable = self._begun and loop.mode == "paused"
        return loop.filter.stopped or ("a stop was released, and the arm not resumed" if resumable else "")

    def problem(self) -> str:
        """Why the arm does not move, or ""."""
        if self.stopped:
            return f"stopped: {self.stopped}"
        return self._control.failure or self._connection.problem() or self._sensors_problem()

    def release(self) -> None:
        """Undo a latched stop; the arm moves slowly at first. RobotError while what stopped it is still there."""
        self._control.wait_for_rest()
        try:
            if problem := self._connection.problem():
                raise ValueError(problem)
            with self._control.lock:
                self._control.loop.release()
            if self._begun:
                self._control.resume()
        except ValueError as error:
            raise RobotError(str(error)) from error

    def rest(self) -> None:
        """Brake, and take no actions until ``reset``: people may move the arm. Waits a little for a frame of that."""
        self._begun = False
        self._control.rest()
        self._control.wait_for_rest()
        self._taken.clear()
        rest_s, cameras = time.monotonic(), self._connection.cameras
        while (cameras.taken_s() or 0.0) < rest_s and time.monotonic() < rest_s + SHOWN_S:
            time.sleep(0.005)

    def executed(self, steps: int) -> list[Float32[np.ndarray, " A"] | None]:
        """Of the episode's first ``steps`` actions what the arm was sent, after all limits; None where not known."""
        return [self._actions.executed_as.get(number) for number in range(1, steps + 1)]

    def rest_action(self) -> Float32[np.ndarray, " A"]:
        """The action of an arm that stays where it is, its gripper included."""
        measured = self._connection.joints.measure()
        assert measured is not None
        rest = action_towards(self._embodiment, measured.positions, measured.positions)
        return np.clip(rest, -1.0, 1.0).astype(np.float32)

    def frames(self, size: int) -> UInt8[np.ndarray, "cameras size size 3"]:
        """The newest, for people. UnreadableImages as ``observe``."""
        return self._images((size, size))[0]

    def _images(self, size: Sequence[int]) -> tuple[UInt8[np.ndarray, "cameras height width 3"], float]:
        newest = self._connection.cameras.images(size)
        assert newest is not None
        return np.stack([newest[0][camera] for camera in self.spec.cameras]), newest[1]

    def _sensors_problem(self) -> str:
        measured, taken_s = self._connection.joints.measure(), self._connection.cameras.taken_s()
        if measured is None:
            return self._connection.joints.problem
        if (age_s := time.monotonic() - measured.stamp_s) > self._robot.limits.max_measurement_age_s:
            return f"the joints were measured {age_s:.2f} s ago"
        return images_problem(taken_s, self._robot.control.max_image_age_s, now_s=time.monotonic())

    def _check_motions(self, held: Sequence[int]) -> None:
        """RobotError unless action 0 leaves the arm where it is, but for the dimensions ``held``."""
        if set(position_dimensions(self._embodiment, self._robot.limits.axes)) - set(held):
            raise RobotError(
                f"a person corrects by motions, and actions of {self._robot.control.embodiment} are positions; "
                "use a robot file and a policy with another embodiment, such as joint_steps"
            )


class ExecutedActions(SteppedSource):
    """``executed_as``: number of the action, from 1, and what the arm was sent for it."""

    def __init__(self) -> None:
        super().__init__()
        self.executed_as: dict[int, Float32[np.ndarray, " A"]] = {}
        self._tick = -1

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        action = super().action(tick, measured, lead_ticks)
        if action is not None:
            self._tick = tick
        return action

    def executed(self, tick: int, action: Float[np.ndarray, " A"]) -> None:
        if tick == self._tick:
            self.executed_as[self._num_taken] = action.astype(np.float32)

    def forget(self) -> None:
        """A new episode; the arm is at rest."""
        with self._changed:
            self.executed_as, self._num_taken, self._tick = {}, 0, -1


_NO_SNAPSHOT = "an arm cannot be captured or restored; a person sets its scene up again"
