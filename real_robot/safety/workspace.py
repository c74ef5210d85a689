"""Whether a motion, and the stop that would follow it, keeps the end effector inside a box."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from real_robot.safety.commands import SafetyEvent
from real_robot.safety.kinematics import EndEffectorPoint, JointFrame, LeverArms, Vector, max_travel
from real_robot.safety.stopping import AxisLimits, Stop, along, duration

# Points of a stop that are looked at; a motion that needs more is refused, as it is too close to a face.
MAX_POINTS = 6


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Box that the end effector must stay in, base frame [m].

    ``frames``: the kinematic chain. ``end_effector``: its position in the last joint's frame [m].
    """

    low: Vector
    high: Vector
    frames: tuple[JointFrame, ...]
    end_effector: Vector = (0.0, 0.0, 0.0)


class Motions(NamedTuple):
    """Position, speed and acceleration of every joint at a tick (in ticks), and its stop from there."""

    positions: Sequence[float]
    speeds: Sequence[float]
    accels: Sequence[float]
    stops: Sequence[Stop]


class _Point(NamedTuple):
    """Of a stop: tick, depth of the end effector in the box, lever arms, every joint's offset there."""

    tick: int
    depth: float
    levers: LeverArms
    offsets: Sequence[float]


class WorkspaceCheck:
    """The rule of one robot's workspace box, whose joints are ``axes``.

    Between two positions that are, together, deeper inside the box than the travel between them is long, the end
    effector stays inside. Otherwise a position between the two is looked at.
    """

    def __init__(self, box: Workspace, axes: Sequence[AxisLimits]) -> None:
        self._box = box
        self._point = EndEffectorPoint(box.frames, box.end_effector, axes)

    def position(self, joints: Sequence[float]) -> Vector:
        """Of the end effector in the base frame [m]."""
        return self._point(joints)

    def violation(self, before: Sequence[float], motions: Motions) -> SafetyEvent | None:
        """Whether the end effector leaves the box on the way from ``before`` (one tick) or in the stop that follows."""
        depth, levers = self.depth(motions.positions)
        if depth < 0.0:
            return SafetyEvent("workspace", None, depth, 0.0)
        sweeps = [abs(q - p) for q, p in zip(motions.positions, before, strict=True)]
        travel = max_travel(levers, sweeps)
        if depth < travel and depth + self.depth(before)[0] < travel:
            return SafetyEvent("workspace", None, depth - travel, 0.0)
        if depth >= max_travel(levers, [stop[4] for stop in motions.stops]):
            return None
        last = max([duration(stop[0]) for stop in motions.stops])
        self._points_left = MAX_POINTS
        end = self._at(motions, last)
        if end.depth < 0.0:
            return SafetyEvent("workspace", None, end.depth, 0.0)
        return self._between(motions, _Point(0, depth, levers, [0.0] * len(sweeps)), end)

    def _at(self, motions: Motions, tick: int) -> _Point:
        """The stop at ``tick``."""
        self._points_left -= 1
        offsets = [
            along(stop[0], speed, accel, tick)[0]
            for stop, speed, accel in zip(motions.stops, motions.speeds, motions.accels, strict=True)
        ]
        depth, levers = self.depth([q + d for q, d in zip(motions.positions, offsets, strict=True)])
        return _Point(tick, depth, levers, offsets)

    def _between(self, motions: Motions, first: _Point, last: _Point) -> SafetyEvent | None:
        """The same between two points of the stop that are inside."""
        sweeps = [
            abs(b - a) if 0.0 in (stop[1], stop[2]) else stop[4]  # the path length, if the joint turns back
            for a, b, stop in zip(first.offsets, last.offsets, motions.stops, strict=True)
        ]
        travel = max_travel(last.levers, sweeps)
        if first.depth + last.depth >= travel:
            return None
        if last.tick - first.tick < 2 or not self._points_left:
            return SafetyEvent("workspace", None, first.depth + last.depth - travel, 0.0)
        # about half of the distance, as it slows down
        middle = self._at(motions, first.tick + max(1, (last.tick - first.tick) * 3 // 10))
        if middle.depth < 0.0:
            return SafetyEvent("workspace", None, middle.depth, 0.0)
        return self._between(motions, first, middle) or self._between(motions, middle, last)

    def depth(self, positions: Sequence[float]) -> tuple[float, LeverArms]:
        """Distance [m] of the end effector to the nearest face of the box, negative outside; and the lever arms."""
        (x, y, z), levers = self._point.position_and_levers(positions)
        (x0, y0, z0), (x1, y1, z1) = self._box.low, self._box.high
        depth = x - x0
        for other in (x1 - x, y - y0, y1 - y, z - z0, z1 - z):
            if other < depth:
                depth = other
        return depth, levers
