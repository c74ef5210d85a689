"""The box that the end effector must stay in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from real_robot.safety.commands import Rejection
from real_robot.safety.kinematics import EndEffectorPoint, JointFrame, LeverArms, Vector, max_travel
from real_robot.safety.stopping import AxisLimits

Depth = tuple[float, LeverArms]  # distance of the end effector to the nearest face, negative outside; and lever arms


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Box that the end effector must stay in, base frame [m].

    ``frames``: the kinematic chain. ``end_effector``: its position in the last joint's frame [m].
    """

    low: Vector
    high: Vector
    frames: tuple[JointFrame, ...]
    end_effector: Vector = (0.0, 0.0, 0.0)


class WorkspaceClearance:
    """Depth of the end effector in the box of a robot whose joints are ``axes``."""

    reason: Rejection = "workspace"

    def __init__(self, box: Workspace, axes: Sequence[AxisLimits]) -> None:
        self._box = box
        self._point = EndEffectorPoint(box.frames, box.end_effector, axes)

    def at(self, positions: Sequence[float]) -> Depth:
        (x, y, z), levers = self._point.position_and_levers(positions)
        (x0, y0, z0), (x1, y1, z1) = self._box.low, self._box.high
        depth = x - x0
        for other in (x1 - x, y - y0, y1 - y, z - z0, z1 - z):
            if other < depth:
                depth = other
        return depth, levers

    def least(self, state: Depth) -> float:
        return state[0]

    def left(self, state: Depth, sweeps: Sequence[float], other: Depth | None = None) -> float:
        return state[0] + (other[0] if other else 0.0) - max_travel(state[1], sweeps)

    def start_problem(self, positions: Sequence[float]) -> str:
        if self.at(positions)[0] >= 0.0:
            return ""
        where = ", ".join(f"{x:.3f}" for x in self._point(positions))
        return f"the end effector is at ({where}) m, outside the workspace box; move the arm inside by hand"
