"""What was and will be sent to the controller: the motion at recent and coming ticks."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from real_robot.safety.commands import PathPoint
from real_robot.safety.stopping import along
from real_robot.safety.swept import Motions


class SentPoint(NamedTuple):
    """The motion at one tick, in ticks and in SI units; ``moved``: the last tick up to here that is not at rest."""

    tick: int
    motions: Motions
    sent: PathPoint
    moved: int


class SentPath:
    """The last ``kept`` points, one per tick, and the present tick ``now``, which is at ``time_s``."""

    def __init__(self, command_hz: float, kept: int) -> None:
        self._hz, self._dt = command_hz, 1.0 / command_hz
        self._points: deque[SentPoint] = deque(maxlen=kept)
        self.restart(0.0)

    def restart(self, time_s: float) -> None:
        """Forget all points; it is tick 0."""
        self.now, self.time_s = 0, time_s
        self._points.clear()

    @property
    def last(self) -> SentPoint:
        return self._points[-1]

    def append(self, tick: int, motions: Motions, moved: int | None = None) -> None:
        if moved is None:
            moving = any(motions.speeds) or any(motions.accels)
            moved = tick if moving else self._points[-1].moved
        sent = self._in_si(tick, motions.positions, motions.speeds, motions.accels)
        self._points.append(SentPoint(tick, motions, sent, moved))

    def drop_from(self, tick: int) -> None:
        """Forget the points after ``tick``, except the first of all."""
        while self._points[-1].tick > max(tick, self._points[0].tick):
            self._points.pop()

    def from_tick(self, first: int) -> list[PathPoint]:
        """The points from this tick on, and the stop that follows the last one."""
        points = [point.sent for point in self._points if point.tick >= first]
        tick, (positions, speeds, accels, stops), *_ = self._points[-1]
        # the jerk is constant between these ticks of the stop
        ends = {end for (_, n1, n2, _, n3), *_ in stops for end in (n1, n1 + n2, n1 + n2 + n3)}
        for ticks in sorted(ends - {0}):
            joints = zip(positions, speeds, accels, stops, strict=True)
            motions = [(q, *along(stop[0], u, w, ticks)) for q, u, w, stop in joints]
            points.append(self._in_si(tick + ticks, [q + d for q, d, _, _ in motions],
                                      [u for _, _, u, _ in motions], [w for *_, w in motions]))  # fmt: skip
        return points

    def positions(self, time_s: float) -> list[float]:
        """Where every joint was sent for this time."""
        points = self._points
        ticks = (time_s - self.time_s) * self._hz + self.now - points[0].tick
        ticks = min(max(ticks, 0.0), len(points) - 1.0)
        i = min(int(ticks), len(points) - 2)
        if i < 0:
            return list(points[0].motions.positions)
        share = ticks - i
        pairs = zip(points[i].motions.positions, points[i + 1].motions.positions, strict=True)
        return [a + share * (b - a) for a, b in pairs]

    def _in_si(
        self, tick: int, positions: Sequence[float], speeds: Sequence[float], accels: Sequence[float]
    ) -> PathPoint:
        hz = self._hz
        time_s = self.time_s + (tick - self.now) * self._dt
        return PathPoint(
            time_s, tuple(positions), tuple([u * hz for u in speeds]), tuple([w * hz * hz for w in accels])
        )
