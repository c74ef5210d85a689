"""The box that the end effector must stay in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt

from real_robot.safety.commands import Rejection
from real_robot.safety.kinematics import EndEffectorPoint, JointFrame, LeverArms, Vector, max_travel
from real_robot.safety.stopping import AxisLimits
from real_robot.safety.swept import POINT_CLEARANCE

# Distance of the end effector to the nearest face, negative outside; where it is; lever arms.
Depth = tuple[float, Vector, LeverArms]


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

    def near(self, positions: Sequence[float], sweeps: Sequence[float]) -> tuple[None, Depth] | None:
        state = self.at(positions)
        return None if state[0] >= max_travel(state[2], sweeps) + POINT_CLEARANCE else (None, state)

    def at(self, positions: Sequence[float], among: None = None) -> Depth:
        place, levers = self._point.position_and_levers(positions)
        x, y, z = place
        (x0, y0, z0), (x1, y1, z1) = self._box.low, self._box.high
        return min(x - x0, x1 - x, y - y0, y1 - y, z - z0, z1 - z), place, levers

    def least(self, state: Depth) -> float:
        return state[0]

    def left(self, state: Depth, sweeps: Sequence[float], other: Depth | None = None, among: None = None) -> float:
        """A path of length L between two places is in the ellipsoid of points whose distances from both add up to L.

        That reaches sqrt(L^2 - D^2 + d^2) / 2 from the middle towards a face, where D is the distance of the places and
        d its part at right angles to the face.
        """
        depth, place, levers = state
        travel = max_travel(levers, sweeps)
        if other is None:
            return depth - travel
        apart = [b - a for a, b in zip(place, other[1], strict=True)]
        spare = travel * travel - sum([d * d for d in apart])
        left = inf
        for low, high, a, b, d in zip(self._box.low, self._box.high, place, other[1], apart, strict=True):
            square = spare + d * d
            reach = sqrt(square) if square > 0.0 else 0.0
            left = min(left, a + b - reach - 2.0 * low, 2.0 * high - a - b - reach)
        return left

    def between(
        self, first: Depth, last: Depth, sweeps: Sequence[float], among: None
    ) -> tuple[None, Depth, Depth] | None:
        return None if self.left(last, sweeps, first) >= 0.0 else (None, first, last)

    def start_problem(self, positions: Sequence[float]) -> str:
        if self.at(positions)[0] >= POINT_CLEARANCE:
            return ""
        where = ", ".join(f"{x:.3f}" for x in self._point(positions))
        return (
            f"the end effector is at ({where}) m, not {1e3 * POINT_CLEARANCE:g} mm inside the workspace box; "
            "move the arm inside by hand"
        )
