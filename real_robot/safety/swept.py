"""Whether a motion, and the stop that would follow it, stays clear of something: the faces of a box, other bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar, runtime_checkable

from real_robot.safety.commands import Rejection, SafetyEvent
from real_robot.safety.stopping import AT_REST, Stop, duration, offset_at

# Least clearance [m] at the positions that are looked at, zero between them. An arm at rest has as much, so that it can
# leave, if slowly.
POINT_CLEARANCE = 0.001

A = TypeVar("A")
S = TypeVar("S")


class Motions(NamedTuple):
    """Position, speed and acceleration of every joint at a tick (in ticks), and its stop from there."""

    positions: Sequence[float]
    speeds: Sequence[float]
    accels: Sequence[float]
    stops: Sequence[Stop]


def resting(positions: Sequence[float]) -> Motions:
    """The joints at rest there."""
    still = [0.0] * len(positions)
    return Motions(positions, still, still, [AT_REST] * len(positions))


@runtime_checkable
class Clearance(Protocol[A, S]):
    """How far a robot is from what it must stay clear of, in states of its own kind."""

    reason: Rejection

    def near(self, positions: Sequence[float], sweeps: Sequence[float]) -> tuple[A, S] | None:
        """What may come nearer than ``POINT_CLEARANCE`` while each joint moves by ``sweeps`` [path length, rad or m] to
        or from these joint positions, and its state there; None: nothing."""
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
        """Why the arm may not start here, nearer than ``POINT_CLEARANCE``, or an empty text."""
        ...


class SweptCheck(Generic[A, S]):
    """The rule that a robot stays clear, between ticks and in the stop too.

    Between two positions whose clearances are, together, larger than the travel between them is long, there is no
    contact. Otherwise one position between the two is looked at; a motion that needs more is refused, as it is too fast
    so close.
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
        if (least := clearance.least(state)) < POINT_CLEARANCE:
            return self._event(least, POINT_CLEARANCE)
        left = clearance.left(state, sweeps, None, among)
        if left < 0.0 and clearance.left(state, sweeps, clearance.at(before, among), among) < 0.0:
            return self._event(left)
        return self._stop_violation(motions, among, state)

    def _stop_violation(self, motions: Motions, among: A, state: S) -> SafetyEvent | None:
        """The same of the stop, which begins at ``state``."""
        clearance, positions = self.clearance, motions.positions
        start, rest = [0.0] * len(positions), [stop[3] for stop in motions.stops]
        end = clearance.at([q + d for q, d in zip(positions, rest, strict=True)], among)
        if (least := clearance.least(end)) < POINT_CLEARANCE:
            return self._event(least, POINT_CLEARANCE)
        near = clearance.between(state, end, _sweeps(start, rest, motions), among)
        if near is None:
            return None
        among, state, end = near
        tick = max(1, max([duration(stop[0]) for stop in motions.stops]) * 3 // 10)  # half of the way, as it slows down
        joints = zip(motions.stops, motions.speeds, motions.accels, strict=True)
        half = [offset_at(stop, u, w, tick) for stop, u, w in joints]
        middle = clearance.at([q + d for q, d in zip(positions, half, strict=True)], among)
        if (least := clearance.least(middle)) < POINT_CLEARANCE:
            return self._event(least, POINT_CLEARANCE)
        for first, a, last, b in ((state, start, middle, half), (middle, half, end, rest)):
            if (left := clearance.left(last, _sweeps(a, b, motions), first, among)) < 0.0:
                return self._event(left)
        return None

    def _event(self, value: float, limit: float = 0.0) -> SafetyEvent:
        return SafetyEvent(self.clearance.reason, None, value, limit)


def _sweeps(first: Sequence[float], last: Sequence[float], motions: Motions) -> list[float]:
    """Path length of each joint between two of its offsets in the stop; of the whole stop, if it turns back."""
    return [
        abs(b - a) if 0.0 in (stop[1], stop[2]) else stop[4]
        for a, b, stop in zip(first, last, motions.stops, strict=True)
    ]
