"""LeRobot's flat dictionaries of numbers and what they mean for the arm of a robot file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from real_robot.control.embodiment import Embodiment, JointPositions
from real_robot.lerobot.devices import JointUnits
from real_robot.robot_file import LeRobotDevice, LeRobotJoint, Robot, RobotError


@runtime_checkable
class ActionValues(Protocol):
    """``names``: keys of an action; ``embodiment``: what the action [A] in [-1, 1] behind them means."""

    names: list[str]
    embodiment: Embodiment

    def action(self, values: Mapping[str, Any]) -> Float[np.ndarray, " A"]:
        """RobotError if the keys are others."""
        ...

    def values(self, action: Float[np.ndarray, " A"]) -> dict[str, float]:
        """Inverse of ``action``."""
        ...


class PositionValues:
    """Joint positions: in LeRobot's names and units where the file has a section ``lerobot``, else JOINT.pos in SI."""

    def __init__(self, robot: Robot) -> None:
        axes = robot.limits.axes
        plain = {axis.name: LeRobotJoint(key=f"{axis.name}.pos", at_0=0.0, per_unit=1.0) for axis in axes}
        self._units = JointUnits(robot.lerobot or LeRobotDevice(type="", config={}, joints=plain), axes)
        self.names = self._units.keys

    def positions(self, values: Mapping[str, Any]) -> list[float]:
        """[rad or m], in the order of the file's limits. RobotError if a joint is missing."""
        _check_names(values, self.names)
        return self._units.positions(values)

    def values(self, positions: Sequence[float]) -> dict[str, float]:
        return self._units.values(positions)


class GoalPositions:
    """Actions are positions of the joints, within their limits."""

    def __init__(self, robot: Robot) -> None:
        self._positions = PositionValues(robot)
        self.names = self._positions.names
        self.embodiment: Embodiment = JointPositions([axis.position for axis in robot.limits.axes])

    def action(self, values: Mapping[str, Any]) -> Float[np.ndarray, " A"]:
        return self.embodiment.state(self._positions.positions(values))

    def values(self, action: Float[np.ndarray, " A"]) -> dict[str, float]:
        return self._positions.values(self.embodiment.targets(action, []))


class EmbodimentActions:
    """Actions of the file's ``control.embodiment``: action_0, action_1, ..."""

    def __init__(self, robot: Robot) -> None:
        self.embodiment = robot.embodiment()
        self.names = [f"action_{dim}" for dim in range(self.embodiment.action_dim)]

    def action(self, values: Mapping[str, Any]) -> Float[np.ndarray, " A"]:
        _check_names(values, self.names)
        return np.array([float(values[name]) for name in self.names], dtype=np.float32)

    def values(self, action: Float[np.ndarray, " A"]) -> dict[str, float]:
        return dict(zip(self.names, action.tolist(), strict=True))


KINDS: Mapping[str, Callable[[Robot], ActionValues]] = {"positions": GoalPositions, "embodiment": EmbodimentActions}


def action_values(robot: Robot, kind: str) -> ActionValues:
    """``kind``: a key of KINDS."""
    return KINDS[kind](robot)


def _check_names(values: Mapping[str, Any], names: Sequence[str]) -> None:
    if set(values) != set(names):
        raise RobotError(
            f"an action has {sorted(values)}, this arm takes {sorted(names)}; robot.actions is 'positions' for a "
            "leader and 'embodiment' for the keyboard"
        )
