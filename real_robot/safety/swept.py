"""Whether a motion, and the stop that would follow it, stays clear of something: the faces of a box, other bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from real_robot.safety.commands import Rejection, SafetyEvent
from real_robot.safety.stopping import Stop, duration, offset_at

# Points of a stop that are looked at; a motion that needs more is refused, as it is too close.
MAX_POINTS = 6

A = TypeVar("A")
S = TypeVar("S")


class Motions(NamedTuple):
    """Position, speed and acceleration of every joint at a tick (in ticks), and its stop from there."""

    positions: Sequence[float]
    speeds: Sequence[float]
    accels: Sequence[float]
    stops: Sequence[Stop]


@runtime_checkable
class Clearance(Protocol[A, S]):
    """How far a robot is from what it must stay clear of, in states of its own kind."""

    reason: Rejection

    def near(self, positions: Sequence[float], sweeps: Sequence[float]) -> tuple[A, S] | None:
        """What may be touched while each joint moves by ``sweeps`` [path length, rad or m] to or from these joint
        positions, and its state there; None: nothing."""
        ...

    def at(self, positions: Sequence[float], among: A | None = None) -> S:
        """The state at these joint positions, of what ``near`` named or of all."""
        ...

    def least(self, state: S) -> float:
        """Smallest clearance [m] of a state, negative where it is not clear."""
        ...

    def left(self, state: S, sweeps: Sequence[float], other: S | None = None, among: A | None = None) -> float:
        """Clearance [m] that is left, at least, while each joint moves by ``sweeps`` to or from ``state``; with
        ``other``, on the way between the two. Both states are of ``among``."""
        ...

    def between(self, first: S, last: S, sweeps: Sequence[float], among: A) -> tuple[A, S, S] | None:
        """What may be touched on the way between two states of ``among``, and its states; None: nothing."""
        ...

    def start_problem(self, positions: Sequence[float]) -> str:
        """Why the arm may not start here, or an empty text."""
        ...


class _Point(NamedTuple):
    """Of a stop: tick, state, every joint's offset there."""

    tick: int
    state: Any
    offsets: Sequence[float]


class SweptCheck(Generic[A, S]):
    """The rule that a robot stays clear, between ticks and in the stop too.

    Between two positions whose clearances are, together, larger than the travel between them is long, there is no
    contact. Otherwise a position between the two is looked at.
    """

    def __init__(self, clearance: Clearance[A, S]) -> None:
        self.clearance = clearance

    def violation(self, before: Sequence[float], motions: Motions) -> SafetyEvent | None:
        """Whether clearance is lost on the way from ``before`` (one tick) or in the stop that follows."""
        clearance, positions = self.clearance, motions.positions
        sweeps = [abs(q - p) for q, p in zip(positions, before, strict=True)]
        stops = [stop[4] for stop in motions.stops]
        near = clearance.near(positions, [a if a > b else b for a, b in zip(sweeps, stops, strict=True)])
        if near is None:
            return None
        among, state = near
        least = clearance.least(state)
        if least < 0.0:
            return self._event(least)
        left = clearance.left(state, sweeps, None, among)
        if left < 0.0 and clearance.left(state, sweeps, clearance.at(before, among), among) < 0.0:
            return self._event(left)
        self._points_left = MAX_POINTS
        ticks = max([duration(stop[0]) for stop in motions.stops])
        end = self._point(motions, among, ticks, [stop[3] for stop in motions.stops])
        least = clearance.least(end.state)
        if least < 0.0:
            return self._event(least)
        return self._between(motions, among, _Point(0, state, [0.0] * len(sweeps)), end)

    def _event(self, value: float) -> SafetyEvent:
        return SafetyEvent(self.clearance.reason, None, value, 0.0)

    def _point(self, motions: Motions, among: A, tick: int, offsets: list[float]) -> _Point:
        """The stop at ``tick``."""
        self._points_left -= 1
        positions = [q + d for q, d in zip(motions.positions, offsets, strict=True)]
        return _Point(tick, self.clearance.at(positions, among), offsets)

    def _between(self, motions: Motions, among: A, first: _Point, last: _Point) -> SafetyEvent | None:
        """The same between two points of the stop that are clear."""
        clearance = self.clearance
        sweeps = [
            abs(b - a) if 0.0 in (stop[1], stop[2]) else stop[4]  # the path length, if the joint turns back
            for a, b, stop in zip(first.offsets, last.offsets, motions.stops, strict=True)
        ]
        near = clearance.between(first.state, last.state, sweeps, among)
        if near is None:
            return None
        if last.tick - first.tick < 2 or not self._points_left:
            return self._event(clearance.left(last.state, sweeps, first.state, among))
        among, first_state, last_state = near
        # about half of the distance, as it slows down
        tick = first.tick + max(1, (last.tick - first.tick) * 3 // 10)
        stops = zip(motions.stops, motions.speeds, motions.accels, strict=True)
        middle = self._point(motions, among, tick, [offset_at(stop, u, w, tick) for stop, u, w in stops])
        least = clearance.least(middle.state)
        if least < 0.0:
            return self._event(least)
        return self._between(motions, among, _Point(first.tick, first_state, first.offsets), middle) or self._between(
            motions, among, middle, _Point(last.tick, last_state, last.offsets)
        )
