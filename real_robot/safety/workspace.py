"""Whether a motion, and the stop that would follow it, keeps the end effector inside a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from real_robot.safety.commands import SafetyEvent
from real_robot.safety.kinematics import EndEffectorPoint, JointFrame, LeverArms, Vector, max_travel
from real_robot.safety.stopping import Axis, AxisLimits, Curve

# A point of a stop: its tick, the end effector's depth in the box there, each joint's travel up to there.
Point = tuple[int, float, Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Box that the end effector must stay in, base frame [m].

    ``frames``: the kinematic chain. ``end_effector``: its position in the last joint's frame [m].
    """

    low: Vector
    high: Vector
    frames: tuple[JointFrame, ...]
    end_effector: Vector = (0.0, 0.0, 0.0)


class WorkspaceCheck:
    """The rule of one robot's workspace box, whose joints are ``axes``."""

    def __init__(self, box: Workspace, limits: Sequence[AxisLimits], axes: Sequence[Axis]) -> None:
        self._box, self._axes = box, axes
        self._point = EndEffectorPoint(box.frames, box.end_effector, limits)

    def position(self, joints: Sequence[float]) -> Vector:
        """Of the end effector in the base frame [m]."""
        return self._point(joints)

    def violation(
        self,
        positions: Sequence[float],
        speeds: Sequence[float],
        accels: Sequence[float],
        distances: Sequence[float],
    ) -> SafetyEvent | None:
        """Whether the end effector is outside the box at this tick or at any tick of the stop that follows it.

        Between two points of the stop that are, together, deeper inside the box than the travel between them is long,
        it stays inside. Otherwise a point between the two is checked. ``distances``: upper bounds of the joints'
        stopping distances.
        """
        depth, levers = self.depth(positions)
        if 0.0 <= depth < max_travel(levers, distances):
            stops = [axis.stop(v, a) for axis, v, a in zip(self._axes, speeds, accels, strict=True)]
            swept = [stop[3] for stop in stops]
            depth_at_end, levers = self.depth([q + stop[2] for q, stop in zip(positions, stops, strict=True)])
            if 0.0 <= depth_at_end < max_travel(levers, swept) - depth:
                last, curves = max([stop[5] for stop in stops]), [stop[6] for stop in stops]
                return self._violation_between(
                    positions, curves, (0, depth, [0.0] * len(stops)), (last, depth_at_end, swept)
                )
            depth = min(depth, depth_at_end)
        return SafetyEvent("workspace", None, depth, 0.0) if depth < 0.0 else None

    def _violation_between(
        self, start: Sequence[float], curves: Sequence[Curve], here: Point, there: Point
    ) -> SafetyEvent | None:
        """The same between two points of the stop from ``start`` that are inside."""
        (first, depth_here, swept_here), (last, depth_there, swept_there) = here, there
        if last - first < 2:
            return None
        tick = first + max(1, (last - first) * 3 // 10)  # about half the distance, as it slows down
        positions, swept, before, after = [], [], [], []
        for axis, q, curve, to_here, to_there in zip(self._axes, start, curves, swept_here, swept_there, strict=True):
            offset, distance = axis.along(curve, tick)
            positions.append(q + offset)
            swept.append(distance)
            before.append(distance - to_here)
            after.append(to_there - distance)
        depth, levers = self.depth(positions)
        if depth < 0.0:
            return SafetyEvent("workspace", None, depth, 0.0)
        point, event = (tick, depth, swept), None
        if depth + depth_there < max_travel(levers, after):
            event = self._violation_between(start, curves, point, there)
        if event is None and depth + depth_here < max_travel(levers, before):
            event = self._violation_between(start, curves, here, point)
        return event

    def depth(self, positions: Sequence[float]) -> tuple[float, LeverArms]:
        """Distance [m] of the end effector to the nearest face of the box, negative outside; and the lever arms."""
        (x, y, z), levers = self._point.position_and_levers(positions)
        (x0, y0, z0), (x1, y1, z1) = self._box.low, self._box.high
        depth = x - x0
        for other in (x1 - x, y - y0, y1 - y, z - z0, z1 - z):
            if other < depth:
                depth = other
        return depth, levers
