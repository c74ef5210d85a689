"""Whether a motion, and the stop that would follow it, stays clear of something: the faces of a box, other bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from real_robot.safety.commands import Rejection, SafetyEvent
from real_robot.safety.stopping import Stop, along, duration

# Points of a stop that are looked at; a motion that needs more is refused, as it is too close.
MAX_POINTS = 6

S = TypeVar("S")


class Motions(NamedTuple):
    """Position, speed and acceleration of every joint at a tick (in ticks), and its stop from there."""

    positions: Sequence[float]
    speeds: Sequence[float]
    accels: Sequence[float]
    stops: Sequence[Stop]


@runtime_checkable
class Clearance(Protocol[S]):
    """How far a robot is from what it must stay clear of, in states of its own kind."""

    reason: Rejection

    def at(self, positions: Sequence[float]) -> S:
        """The state at these joint positions."""
        ...

    def least(self, state: S) -> float:
        """Smallest clearance [m] of a state, negative where it is not clear."""
        ...

    def left(self, state: S, sweeps: Sequence[float], other: S | None = None) -> float:
        """Clearance [m] that is left, at least, while each joint moves by ``sweeps`` [path length, rad or m] to or from
        ``state``; with ``other``, on the way between the two, where both clearances count."""
        ...

    def start_problem(self, positions: Sequence[float]) -> str:
        """Why the arm may not start here, or an empty text."""
        ...


class _Point(NamedTuple):
    """Of a stop: tick, state, every joint's offset there."""

    tick: int
    state: Any
    offsets: Sequence[float]


class SweptCheck(Generic[S]):
    """The rule that a robot stays clear, between ticks and in the stop too.

    Between two positions whose clearances are, together, larger than the travel between them is long, there is no
    contact. Otherwise a position between the two is looked at.
    """

    def __init__(self, clearance: Clearance[S]) -> None:
        self.clearance = clearance

    def violation(self, before: Sequence[float], motions: Motions) -> SafetyEvent | None:
        """Whether clearance is lost on the way from ``before`` (one tick) or in the stop that follows."""
        clearance = self.clearance
        state = clearance.at(motions.positions)
        least = clearance.least(state)
        if least < 0.0:
            return self._event(least)
        sweeps = [abs(q - p) for q, p in zip(motions.positions, before, strict=True)]
        left = clearance.left(state, sweeps)
        if left < 0.0 and clearance.left(state, sweeps, clearance.at(before)) < 0.0:
            return self._event(left)
        if clearance.left(state, [stop[4] for stop in motions.stops]) >= 0.0:
            return None
        last = max([duration(stop[0]) for stop in motions.stops])
        self._points_left = MAX_POINTS
        end = self._at(motions, last)
        least = clearance.least(end.state)
        if least < 0.0:
            return self._event(least)
        return self._between(motions, _Point(0, state, [0.0] * len(sweeps)), end)

    def _event(self, value: float) -> SafetyEvent:
        return SafetyEvent(self.clearance.reason, None, value, 0.0)

    def _at(self, motions: Motions, tick: int) -> _Point:
        """The stop at ``tick``."""
        self._points_left -= 1
        offsets = [
            along(stop[0], speed, accel, tick)[0]
            for stop, speed, accel in zip(motions.stops, motions.speeds, motions.accels, strict=True)
        ]
        state = self.clearance.at([q + d for q, d in zip(motions.positions, offsets, strict=True)])
        return _Point(tick, state, offsets)

    def _between(self, motions: Motions, first: _Point, last: _Point) -> SafetyEvent | None:
        """The same between two points of the stop that are clear."""
        sweeps = [
            abs(b - a) if 0.0 in (stop[1], stop[2]) else stop[4]  # the path length, if the joint turns back
            for a, b, stop in zip(first.offsets, last.offsets, motions.stops, strict=True)
        ]
        left = self.clearance.left(last.state, sweeps, first.state)
        if left >= 0.0:
            return None
        if last.tick - first.tick < 2 or not self._points_left:
            return self._event(left)
        # about half of the distance, as it slows down
        middle = self._at(motions, first.tick + max(1, (last.tick - first.tick) * 3 // 10))
        least = self.clearance.least(middle.state)
        if least < 0.0:
            return self._event(least)
        return self._between(motions, first, middle) or self._between(motions, middle, last)
