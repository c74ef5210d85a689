"""Our input devices behind LeRobot's interface of teleoperators."""

from __future__ import annotations

import sys
import termios
import tty
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
from jaxtyping import Float
from lerobot.teleoperators import Teleoperator

from lerobot_teleoperator_vla_rl.config_vla_rl import VlaRlTeleoperatorConfig
from real_robot.control.human_source import InputDevice, Leader, position_dimensions
from real_robot.lerobot.devices import make_teleoperator
from real_robot.lerobot.leader import LeRobotLeader
from real_robot.lerobot.values import ActionValues, action_values
from real_robot.robot_file import Robot, RobotError, read_robot
from real_robot.teleop import KeyboardInput
from real_robot.waiting import wait_until_ready

READY_S = 5.0


class VlaRlTeleoperator(Teleoperator):
    """A leader that falls silent, and any key of the keyboard that moves nothing, is an error, which ends LeRobot's
    program; the arm then brakes and holds."""

    config_class, name = VlaRlTeleoperatorConfig, "vla_rl"

    def __init__(self, config: VlaRlTeleoperatorConfig) -> None:
        super().__init__(config)
        self.config, self._robot = config, read_robot(config.file)
        kind = "positions" if config.device == "leader" else "embodiment"
        self._actions: ActionValues = action_values(self._robot, kind)
        self._open = ExitStack()
        self._device: InputDevice | None = None

    @property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(self._actions.names, float)

    @property
    def feedback_features(self) -> dict[str, Any]:
        return {}

    @property
    def is_connected(self) -> bool:
        return self._device is not None

    @property
    def is_calibrated(self) -> bool:
        return True

    def connect(self, calibrate: bool = True) -> None:
        """RobotError if the device cannot be used or is silent."""
        with ExitStack() as stack:
            if self.config.device == "keyboard":
                device: InputDevice = stack.enter_context(_Keyboard(self._robot, self._actions, self.config.held))
            else:
                device = leader = stack.enter_context(_leader(self._robot, self._actions))
                joints = [axis.position[0] for axis in self._robot.limits.axes]
                wait_until_ready(
                    lambda: leader.action(joints) is not None,
                    lambda: leader.problem or "it is silent",
                    within_s=READY_S,
                    what="the leader",
                )
            self._device, self._open = device, stack.pop_all()

    def calibrate(self) -> None:
        """A leader's calibration is LeRobot's own."""

    def configure(self) -> None:
        """Nothing to configure."""

    def get_action(self) -> dict[str, Any]:
        """RobotError if the device is silent, or a key was pressed that ends the motion."""
        device = self._device
        if device is None:
            raise RobotError("the teleoperator is not connected; call connect() first")
        values = device.action([0.0] * len(self._robot.limits.axes))  # positions do not depend on where the arm is
        if values is None:
            raise RobotError(device.problem if isinstance(device, Leader) else "no input")
        return dict(self._actions.values(np.clip(values, -1.0, 1.0)))

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        """Nobody feels it."""

    def disconnect(self) -> None:
        self._device = None
        self._open.close()


class _Keyboard:
    """``KeyboardInput`` that always has an action, at rest while no key is held; use it as a context manager."""

    def __init__(self, robot: Robot, actions: ActionValues, held: Sequence[int]) -> None:
        _check_motions(robot, actions, held)
        self._held = list(held)
        self._last = np.zeros(len(actions.names), dtype=np.float32)
        self._last[self._held] = -1.0

    def __enter__(self) -> _Keyboard:
        self._settings = termios.tcgetattr(sys.stdin) if sys.stdin.isatty() else None
        if self._settings is not None:
            tty.setcbreak(sys.stdin)
        self._keys = KeyboardInput(sys.stdin, len(self._last))
        print(f"{self._keys.motions}   any other key: stop", flush=True)
        return self

    def __exit__(self, *error: object) -> None:
        if self._settings is not None:
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._settings)

    def action(self, joints: Sequence[float]) -> Float[np.ndarray, " A"] | None:
        if self._keys.commands:
            raise RobotError(f"stopped by the key {self._keys.commands[0]!r}")
        pressed = self._keys.action(joints)
        action = np.zeros_like(self._last) if pressed is None else pressed
        kept = [dim for dim in self._held if not action[dim]]
        action[kept] = self._last[kept]
        action[self._held] = np.sign(action[self._held])
        self._last = action
        return action


def _check_motions(robot: Robot, actions: ActionValues, held: Sequence[int]) -> None:
    """RobotError unless action 0 leaves the arm where it is, but for the dimensions ``held``."""
    positions = position_dimensions(actions.embodiment, robot.limits.axes)
    if moving := [dim for dim in positions if dim not in held]:
        raise RobotError(
            f"keys move an arm by motions, and actions of {robot.control.embodiment} are positions in the dimensions "
            f"{moving}; name these in held, or use a leader"
        )


def _leader(robot: Robot, actions: ActionValues) -> LeRobotLeader:
    if robot.leader is None:
        raise RobotError("the robot file has no section 'leader'; give one, or device: keyboard")
    return LeRobotLeader(make_teleoperator(robot.leader), robot.leader, robot.limits.axes, actions.embodiment)
