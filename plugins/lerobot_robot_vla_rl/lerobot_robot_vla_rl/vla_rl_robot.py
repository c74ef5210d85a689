"""The arm of a robot file behind LeRobot's interface of robots.

Every action goes through the control loop and the safety filter of the other programs, with the file's stop inputs.
Actions that stop coming for ``INPUT_AGE_S`` let the arm brake and hold. A latched stop is an error, which ends
LeRobot's program: an episode would otherwise go on being recorded with an arm that does not move.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from jaxtyping import Float
from lerobot.robots import Robot

from lerobot_robot_vla_rl.config_vla_rl import VlaRlRobotConfig
from real_robot.arm_connection import ArmConnection, connected
from real_robot.control.human_source import INPUT_AGE_S, HumanSource
from real_robot.control.thread import ControlThread
from real_robot.images import images_problem
from real_robot.lerobot.values import ActionValues, PositionValues, action_values
from real_robot.robot_file import RobotError, read_robot
from real_robot.waiting import wait_until_ready

READY_S = 5.0  # for what the arm measures; meanwhile it holds


class NewestAction:
    """What LeRobot's program sent last, as the input device of a control loop."""

    def __init__(self) -> None:
        self._values, self._sent_s = np.zeros(0, dtype=np.float32), -INPUT_AGE_S

    def send(self, values: Float[np.ndarray, " A"]) -> None:
        self._values, self._sent_s = values, time.monotonic()

    def action(self, joints: Sequence[float]) -> Float[np.ndarray, " A"] | None:
        return self._values if time.monotonic() - self._sent_s < INPUT_AGE_S else None


class VlaRlRobot(Robot):
    """Positions by LeRobot's names and units where the file has a section ``lerobot``, else JOINT.pos [rad or m]."""

    config_class, name = VlaRlRobotConfig, "vla_rl"

    def __init__(self, config: VlaRlRobotConfig) -> None:
        super().__init__(config)
        self.config, self._robot = config, read_robot(config.file)
        self._positions = PositionValues(self._robot)
        self._actions: ActionValues = action_values(self._robot, config.actions)
        self.cameras = dict((self._robot.lerobot or self._robot.ros).cameras)  # LeRobot counts them
        self._open = ExitStack()
        self._arm: tuple[ArmConnection, ControlThread] | None = None

    @property
    def observation_features(self) -> dict[str, Any]:
        return dict.fromkeys(self._positions.names, float) | dict.fromkeys(self.cameras, (*self.config.image_size, 3))

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(self._actions.names, float)

    @property
    def is_connected(self) -> bool:
        return self._arm is not None

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        """Hold the arm where it is. RobotError says why it cannot be driven."""
        if self._arm is not None:
            raise RobotError("the arm is connected already")
        with ExitStack() as stack:
            connection = stack.enter_context(connected(self._robot, name="vla_rl_lerobot"))
            self._newest = NewestAction()
            source = HumanSource(
                self._newest, self._actions.embodiment, connection.cameras, None, image_size=self.config.image_size,
                max_image_age_s=self._robot.control.max_image_age_s,
            )  # fmt: skip
            try:
                loop = self._robot.control_loop(source, self._actions.embodiment, control_hz=self.config.control_hz)
            except ValueError as error:
                raise RobotError(str(error)) from error
            control = connection.connect(loop)
            stack.callback(connection.close)
            self._start(connection, control)
            self._open, self._arm = stack.pop_all(), (connection, control)

    def _start(self, connection: ArmConnection, control: ControlThread) -> None:
        self._wait_for_joints(connection)
        self._wait_for_images(connection)
        try:
            if problem := connection.problem():
                raise ValueError(problem)
            control.start()
        except ValueError as error:
            raise RobotError(f"the arm cannot start: {error}") from error

    def calibrate(self) -> None:
        """The robot file is the calibration."""

    def configure(self) -> None:
        """Nothing to configure."""

    def get_observation(self) -> dict[str, Any]:
        """The newest joints and images. RobotError if they stay old, or an image is missing."""
        connection, _ = self._connected()
        self._wait_for_joints(connection)
        measured = connection.joints.measure()
        assert measured is not None
        values: dict[str, Any] = dict(self._positions.values(measured.positions))
        if not self.cameras:
            return values
        self._wait_for_images(connection)
        newest = connection.cameras.images(self.config.image_size)
        if newest is None:
            raise RobotError("no image from some camera")
        return values | {camera: np.asarray(newest[0][camera]) for camera in self.cameras}

    def send_action(self, action: Mapping[str, Any]) -> dict[str, Any]:
        """The newest goal of the arm; returns it within the range of an action. RobotError while a stop is latched."""
        _, control = self._connected()
        if reason := control.loop.filter.stopped or control.failure:
            raise RobotError(f"the arm is stopped: {reason}")
        values = np.clip(self._actions.action(action), -1.0, 1.0).astype(np.float32)
        self._newest.send(values)
        return dict(self._actions.values(values))

    def disconnect(self) -> None:
        """Brake, hold, and leave the arm."""
        self._arm = None
        self._open.close()

    def _wait_for_joints(self, connection: ArmConnection) -> None:
        joints, max_age_s = connection.joints, self._robot.limits.max_measurement_age_s
        wait_until_ready(lambda: joints.fresh(max_age_s), lambda: joints.problem, within_s=READY_S)

    def _wait_for_images(self, connection: ArmConnection) -> None:
        if self.cameras:
            cameras, max_age_s = connection.cameras, self._robot.control.max_image_age_s

            def problem() -> str:
                return images_problem(cameras.taken_s(), max_age_s, now_s=time.monotonic())

            wait_until_ready(lambda: not problem(), problem, within_s=READY_S)

    def _connected(self) -> tuple[ArmConnection, ControlThread]:
        if self._arm is None:
            raise RobotError("the arm is not connected; call connect() first")
        return self._arm
