"""What a policy's numbers mean on an arm: its state from the joints, and joint targets from its action.

An embodiment is told what is measured and what was targeted last, and answers with where the joints should be one
control period later. Whether they may go there is the safety filter's business alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from real_robot.robot_file import Robot
from real_robot.safety.stopping import AxisLimits

Vector = NDArray[np.float32]


class Embodiment(Protocol):
    action_dim: int
    state_dim: int

    def state(self, joints: Sequence[float]) -> Vector:
        """What the policy was trained to see, [state_dim]."""
        ...

    def begin(self, joints: Sequence[float]) -> None:
        """Motion starts (again) from here; targets kept from before are forgotten."""
        ...

    def targets(self, action: Vector, joints: Sequence[float]) -> list[float]:
        """Joint positions to reach one control period from now; ``joints`` as measured now."""
        ...


class JointPositions:
    """Action -1..1 spans each joint's range; the state is the joint positions, scaled the same way."""

    def __init__(self, axes: Sequence[AxisLimits]) -> None:
        low, high = np.array([axis.position for axis in axes]).T
        self._center, self._half = (low + high) / 2, (high - low) / 2
        self.action_dim = self.state_dim = len(axes)

    def state(self, joints: Sequence[float]) -> Vector:
        return np.asarray((np.asarray(joints) - self._center) / self._half, dtype=np.float32)

    def begin(self, joints: Sequence[float]) -> None:
        pass

    def targets(self, action: Vector, joints: Sequence[float]) -> list[float]:
        return list((self._center + self._half * np.asarray(action, dtype=np.float64)).tolist())


class JointSteps:
    """Action 1 is the way each joint can go at full speed in one control period; targets add up."""

    def __init__(self, axes: Sequence[AxisLimits], control_hz: float) -> None:
        self._scale = np.array([axis.velocity for axis in axes]) / control_hz
        self._spans = JointPositions(axes)
        self._target: NDArray[np.float64] = np.zeros(len(axes))
        self._leash = np.array([axis.step_from_measured for axis in axes])
        self.action_dim = self.state_dim = len(axes)

    def state(self, joints: Sequence[float]) -> Vector:
        return self._spans.state(joints)

    def begin(self, joints: Sequence[float]) -> None:
        self._target = np.array(joints)

    def targets(self, action: Vector, joints: Sequence[float]) -> list[float]:
        measured = np.asarray(joints)
        ahead = self._target + self._scale * np.asarray(action, dtype=np.float64) - measured
        self._target = measured + np.clip(ahead, -0.9 * self._leash, 0.9 * self._leash)
        return list(self._target.tolist())


def embodiment_of(robot: Robot, control_hz: float) -> Embodiment:
    """The one dispatch from the name in the robot file. ValueError if its joints are not the embodiment's."""
    axes = robot.limits.axes
    if robot.control.embodiment == "joint_positions":
        return JointPositions(axes)
    if robot.control.embodiment == "joint_steps":
        return JointSteps(axes, control_hz)
    from real_robot.control.panda_tool import PandaTool

    return PandaTool(axes)
