"""Embodiments: a policy's state from the joints, joint targets from its action, and its action from a motion.

Scales of actions and states are the robot file's ``control`` section, as in the policy's training. Limits are enforced
by the safety filter alone, so that a lower limit never changes what an action means.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float
from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class ActionScales:
    """Joint positions that -1 and 1 stand for, and the distance of a step of 1 [rad or m]; empty: not in the file."""

    ranges: tuple[tuple[float, float], ...] = ()
    steps: tuple[float, ...] = ()


@runtime_checkable
class Embodiment(Protocol):
    """``joints``: positions in the order of the robot file [rad or m]."""

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

    def achieved(
        self, action: Float[np.ndarray, " A"], start: Sequence[float], end: Sequence[float]
    ) -> Float[np.ndarray, " A"]:
        """The action that describes the motion from ``start`` to ``end``, which was made for ``action``."""
        ...


class JointPositions:
    """Action -1..1 spans each joint's range in ``ranges``; the state is the joint positions, scaled the same way.

    ValueError without ranges.
    """

    def __init__(self, ranges: Sequence[tuple[float, float]]) -> None:
        if not ranges:
            raise ValueError("control.joint_range is missing: give every joint's, as in the policy's training")
        low, high = np.array(ranges).T
        self._center, self._half = (low + high) / 2, (high - low) / 2
        self.action_dim = self.state_dim = len(ranges)

    def state(self, joints: Sequence[float]) -> Float[np.ndarray, " state_dim"]:
        return np.asarray((np.asarray(joints) - self._center) / self._half, dtype=np.float32)

    def begin(self, joints: Sequence[float]) -> None:
        pass

    def targets(self, action: Float[np.ndarray, " A"], joints: Sequence[float]) -> list[float]:
        return list((self._center + self._half * np.asarray(action, dtype=np.float64)).tolist())

    def achieved(
        self, action: Float[np.ndarray, " A"], start: Sequence[float], end: Sequence[float]
    ) -> Float[np.ndarray, " A"]:
        return self.state(end)


class JointSteps:
    """Action 1 moves a joint by its distance in ``steps``; targets accumulate. State as ``JointPositions``.

    A target stays within ``MAX_AHEAD`` full steps of the joint, so that a joint that cannot follow is not pressed on.
    ValueError without ranges or steps.
    """

    MAX_AHEAD = 4.0

    def __init__(self, ranges: Sequence[tuple[float, float]], steps: Sequence[float]) -> None:
        if not steps:
            raise ValueError("control.joint_step is missing: give every joint's, as in the policy's training")
        self._scale = np.array(steps)
        self._positions = JointPositions(ranges)
        self._target: NDArray[np.float64] = np.zeros(len(steps))
        self.action_dim = self.state_dim = len(steps)

    def state(self, joints: Sequence[float]) -> Float[np.ndarray, " state_dim"]:
        return self._positions.state(joints)

    def begin(self, joints: Sequence[float]) -> None:
        self._target = np.array(joints)

    def targets(self, action: Float[np.ndarray, " A"], joints: Sequence[float]) -> list[float]:
        now, most = np.asarray(joints), self.MAX_AHEAD * self._scale
        ahead = self._target + self._scale * np.asarray(action, dtype=np.float64) - now
        self._target = now + np.clip(ahead, -most, most)
        return list(self._target.tolist())

    def achieved(
        self, action: Float[np.ndarray, " A"], start: Sequence[float], end: Sequence[float]
    ) -> Float[np.ndarray, " A"]:
        return np.asarray((np.asarray(end) - np.asarray(start)) / self._scale, dtype=np.float32)
