"""What the values of an arm of LeRobot mean for a policy, from a robot file with a section ``lerobot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.utils.constants import ACTION, OBS_STATE
from torch import Tensor

from policies.policy import PolicySpec
from real_robot.lerobot.devices import JointUnits
from real_robot.robot_file import RobotError, read_robot


class ArmValues:
    """One arm in one episode; ``begin_episode`` before the next. Values are vectors in LeRobot's order."""

    def __init__(self, path: Path, spec: PolicySpec, features: Mapping[str, Any] | None = None) -> None:
        """``features``: of LeRobot's data set, whose names are the order; None: the order of the file's limits.

        RobotError if file, data set and policy do not fit each other.
        """
        robot = read_robot(path)
        if robot.lerobot is None:
            raise RobotError(f"{path}: no 'lerobot' section")
        control, axes = robot.control, robot.limits.axes
        self._embodiment = robot.embodiment()
        self._units = JointUnits(robot.lerobot, axes)
        self.cameras = robot.lerobot.cameras
        self.execute_steps = control.chunking.execute_steps
        self.dim = len(axes)
        self._state_names, self._action_names = (self._names(features, key) for key in (OBS_STATE, ACTION))
        self._begun = False
        sizes = self._embodiment.state_dim, self._embodiment.action_dim
        if sizes != (spec.robot.state_dim, spec.robot.action_dim):
            raise RobotError(
                f"{path}: {control.embodiment} has states of {sizes[0]} and actions of {sizes[1]}, the bundle of "
                f"{spec.robot.state_dim} and {spec.robot.action_dim}"
            )
        if missing := sorted(set(spec.robot.cameras) - set(self.cameras)):
            raise RobotError(f"{path}: lerobot.cameras lacks {missing}, which the bundle needs")

    def begin_episode(self) -> None:
        self._begun = False

    def state(self, values: Tensor) -> Tensor:
        """The policy's state [state_dim]."""
        return torch.from_numpy(self._embodiment.state(self._joints(values)))

    def action(self, action: Tensor, values: Tensor) -> Tensor:
        """What to send for a policy's ``action`` [A] while the arm is at ``values``."""
        joints = self._joints(values)
        if not self._begun:
            self._embodiment.begin(joints)
            self._begun = True
        return self._sent(self._embodiment.targets(_array(action), joints))

    def chunk(self, actions: Tensor, values: Tensor) -> Tensor:
        """[H, values] to send for the ``actions`` [H, A] of a chunk, for an arm that follows from ``values``."""
        joints = self._joints(values)
        self._embodiment.begin(joints)
        self._begun = False
        sent = []
        for action in actions:
            joints = self._embodiment.targets(_array(action), joints)
            sent.append(self._sent(joints))
        return torch.stack(sent)

    def _joints(self, values: Tensor) -> list[float]:
        return self._units.positions(dict(zip(self._state_names, values.tolist(), strict=True)))

    def _sent(self, joints: Sequence[float]) -> Tensor:
        values = self._units.values(joints)
        return torch.tensor([values[name] for name in self._action_names])

    def _names(self, features: Mapping[str, Any] | None, key: str) -> list[str]:
        names = self._units.keys if features is None else list(features[key]["names"])
        if sorted(names) != sorted(self._units.keys):
            raise RobotError(f"LeRobot's {key} is {names}; the robot file's lerobot.joints have {self._units.keys}")
        return names


def _array(action: Tensor) -> np.ndarray:
    return np.asarray(action.cpu().numpy(), dtype=np.float32)
