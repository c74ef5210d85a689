"""Embodiments: a policy's state from the joints, and joint targets from its action.

An embodiment receives the measured joint positions and returns where the joints should be one control period later.
Limits are enforced by the safety filter alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray

from real_robot.safety.stopping import AxisLimits


@runtime_checkable
class Embodiment(Protocol):
    """``joints``: measured positions in the order of the robot file [rad or m]."""

    action_dim: int
    state_dim: int

    def state(self, joints: Sequence[float]) -> Float[np.ndarray, " state_dim"]:
        """The proprioceptive state as in the policy's training, float32."""
        ...

    def begin(self, joints: Sequence[float]) -> None:
        """Motion starts (again) from ``joints``; earlier targets are dropped."""
        ...

    def targets(self, action: Float[np.ndarray, " A"], joints: Sequence[float]) -> list[float]:
        """Joint positions to reach one control period from now, for an action in [-1, 1]."""
        ...


class JointPositions:
    """Action -1..1 spans each joint's range; the state is the joint positions, scaled the same way."""

    def __init__(self, axes: Sequence[AxisLimits]) -> None:
        low, high = np.array([axis.position for axis in axes]).T
        self._center, self._half = (low + high) / 2, (high - low) / 2
        self.action_dim = self.state_dim = len(axes)

    def state(self, joints: Sequence[float]) -> Float[np.ndarray, " state_dim"]:
        return np.asarray((np.asarray(joints) - self._center) / self._half, dtype=np.float32)

    def begin(self, joints: Sequence[float]) -> None:
        pass

    def targets(self, action: Float[np.ndarray, " A"], joints: Sequence[float]) -> list[float]:
        return list((self._center + self._half * np.asarray(action, dtype=np.float64)).tolist())


class JointSteps:
    """Action 1 is the distance that a joint covers at full speed in one control period; targets accumulate.

    Targets stay within 90 % of ``step_from_measured`` of the measured position, as the safety filter rejects more.
    """

    def __init__(self, axes: Sequence[AxisLimits], control_hz: float) -> None:
        self._scale = np.array([axis.velocity for axis in axes]) / control_hz
        self._positions = JointPositions(axes)
        self._target: NDArray[np.float64] = np.zeros(len(axes))
        self._max_offset = 0.9 * np.array([axis.step_from_measured for axis in axes])
        self.action_dim = self.state_dim = len(axes)

    def state(self, joints: Sequence[float]) -> Float[np.ndarray, " state_dim"]:
        return self._positions.state(joints)

    def begin(self, joints: Sequence[float]) -> None:
        self._target = np.array(joints)

    def targets(self, action: Float[np.ndarray, " A"], joints: Sequence[float]) -> list[float]:
        measured = np.asarray(joints)
        offset = self._target + self._scale * np.asarray(action, dtype=np.float64) - measured
        self._target = measured + np.clip(offset, -self._max_offset, self._max_offset)
        return list(self._target.tolist())
