"""Motion of one joint in command ticks of constant jerk, and how it stops.

Within a tick the jerk j is constant, so position, speed and acceleration at the ticks describe the motion between them
exactly. With time in ticks, speed u [rad/tick] and acceleration w [rad/tick^2]:

    q' = q + u + w / 2 + j / 6        u' = u + w + j / 2        w' = w + j

A cubic polynomial is the only cubic through its end positions and speeds, and the only quintic through its end
positions, speeds and accelerations. A trajectory controller that interpolates such points by cubic or quintic splines
therefore reproduces this motion exactly: a limit that holds here holds in the controller, at any rate.

**Viability.** A state is viable if a stop that keeps every limit starts there. The rest of that stop is such a stop for
each state along it. A filter that moves only to viable states, with their stop at hand, never exceeds a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import ceil, sqrt

# Planning leaves a small part of each limit unused, so that rounding never exceeds it.
_PLANNING = 1.0 - 1e-6
_TRIES = 6
# Share of a target's speed u that a joint follows. With the whole of it the joint overshoots by u^2 / 2A wherever the
# target stops at once, as targets of a policy do: then a third of the quick start's pushes succeed, instead of nine
# tenths. With none of it the joint lags four ticks behind.
FOLLOWED = 0.25
CONTROLLER_HZ = 1000.0


@dataclass(frozen=True, kw_only=True)
class AxisLimits:
    """Limits of one joint. Units are rad or m, and per second; ``unit`` says which.

    ``step_from_measured``: largest distance of the measured position from where the joint was sent at that time.
    ``hold_tolerance``: the same for a joint that has been at rest for a while.
    ``contact_residual``: largest external torque or force [N m or N]; None if the robot reports none.
    ``drives``: a joint of a base, which is commanded by its speed alone, so that nothing holds it at a position.
    """

    name: str
    unit: str
    position: tuple[float, float]
    velocity: float
    acceleration: float
    jerk: float
    step_from_measured: float
    hold_tolerance: float = 0.02
    contact_residual: float | None = None
    drives: bool = False


# Plain tuples, as hundreds are made in every tick.
# Jerk and ticks of the first part of a stop, ticks without jerk, jerk and ticks of the last part.
Curve = tuple[float, int, int, float, int]
# A stop relative to its start: curve, lowest and highest position, end position, path length, highest speed.
Stop = tuple[Curve, float, float, float, float, float]
Motion = tuple[float, float, float]  # position, speed, acceleration

AT_REST: Stop = ((0.0, 0, 0, 0.0, 0), 0.0, 0.0, 0.0, 0.0, 0.0)


def duration(curve: Curve) -> int:
    """Ticks until rest."""
    return curve[1] + curve[2] + curve[4]


def along(curve: Curve, speed: float, accel: float, ticks: int) -> Motion:
    """Offset, speed and acceleration after ``ticks`` of the stop from (speed, accel); exactly at rest at its end."""
    first, n1, n2, last, n3 = curve
    at_end = ticks >= n1 + n2 + n3
    offset = 0.0
    for jerk, n in ((first, n1), (0.0, n2), (last, n3)):
        n = min(n, ticks)
        offset += n * (speed + n * (0.5 * accel + n * jerk / 6.0))
        speed += n * (accel + 0.5 * n * jerk)
        accel += n * jerk
        ticks -= n
    return (offset, 0.0, 0.0) if at_end else (offset, speed, accel)


def offset_at(stop: Stop, speed: float, accel: float, ticks: int) -> float:
    """The offset of ``along``, read off backwards from the end where that is shorter."""
    (first, n1, n2, last, n3), end = stop[0], stop[3]
    if ticks <= n1:
        return ticks * (speed + ticks * (0.5 * accel + ticks * first / 6.0))
    left = n1 + n2 + n3 - ticks
    if left <= 0:
        return end
    if left <= n3:
        return end - last * left * left * left / 6.0
    evenly = left - n3
    return end - last * n3 * (n3 * n3 / 6.0 + 0.5 * evenly * (n3 + evenly))


def rest_of(curve: Curve) -> Curve:
    """The curve after one tick."""
    first, n1, n2, last, n3 = curve
    if n1:
        return first, n1 - 1, n2, last, n3
    return (0.0, 0, n2 - 1, last, n3) if n2 else (0.0, 0, 0, last, max(0, n3 - 1))


def braked(position: float, speed: float, accel: float, stop: Stop) -> tuple[float, float, float, Stop]:
    """One joint after one tick of its stop, and the rest of the stop."""
    curve, lowest, highest, end, distance, fastest = stop
    if not duration(curve):
        return position, 0.0, 0.0, AT_REST
    offset, speed, accel = along(curve, speed, accel, 1)
    if 0.0 in (lowest, highest):  # it does not turn back
        distance -= abs(offset)
        lowest, highest = min(0.0, end - offset), max(0.0, end - offset)
    else:
        lowest, highest = lowest - offset, highest - offset
    return position + offset, speed, accel, (rest_of(curve), lowest, highest, end - offset, distance, fastest)


class Axis:
    """One joint at a fixed command period: its limits in ticks, its stop, and its approach to a target."""

    __slots__ = ("_accel", "_dt", "_ramp", "_speed", "far", "high", "low", "max_accel", "max_jerk", "max_speed")

    def __init__(self, limits: AxisLimits, dt: float) -> None:
        self.low, self.high = limits.position
        self._dt = dt
        self.max_speed = limits.velocity * dt
        self.max_accel = limits.acceleration * dt * dt
        self.max_jerk = limits.jerk * dt * dt * dt
        self.far = 16.0 * self.max_accel  # from here on acceleration limits the approach, see ``toward``
        self._speed = self.max_speed * _PLANNING
        self._accel = self.max_accel * _PLANNING
        self._ramp = self.max_jerk * _PLANNING

    def stop(self, speed: float, accel: float) -> Stop | None:
        """A short stop from (speed, accel) within the limits of acceleration and jerk, in whole ticks.

        The deceleration p is reached in n1 ticks, kept for n2 and left in n3. Without whole ticks and with
        p <= A the fastest stop has p^2 = J u + w^2 / 2; the ticks are rounded up from that, and p follows from
        u + w n1 / 2 = p (n1 / 2 + n2 + n3 / 2). None if rounding finds none within the limits.
        """
        if not speed and not accel:
            return AT_REST
        ramp, most, steepest = self._ramp, self._accel, self.max_jerk
        turned = 0.5 * accel * accel / ramp
        flipped = (speed + turned if accel >= 0.0 else speed - turned) < 0.0
        if flipped:
            speed, accel = -speed, -accel
        square = ramp * speed + 0.5 * accel * accel
        wanted = sqrt(square) if square > 1e-30 else 1e-15  # less is the rounding of a rest
        if wanted > most:
            wanted = most
        n1, n3 = int((wanted + accel) / ramp - 1e-9) + 1, int(wanted / ramp - 1e-9) + 1
        for _ in range(_TRIES):
            at_zero = speed + 0.5 * accel * n1
            left = at_zero - 0.5 * wanted * (n1 + n3)
            n2 = int(left / wanted - 1e-9) + 1 if left > 0.0 else 0
            peak = at_zero / (0.5 * (n1 + n3) + n2)
            change, allowed = peak + accel, n1 * steepest
            if -most <= peak <= most and -allowed <= change <= allowed and -n3 * steepest <= peak <= n3 * steepest:
                if flipped or speed < 0.0 or peak < 0.0:
                    return _with_extremes(speed, accel, peak, n1, n2, n3, flipped)
                first = -change / n1
                end = n1 * (speed + n1 * (0.5 * accel + n1 * first / 6.0))
                end += n2 * (at_zero - 0.5 * peak * (n1 + n2)) + peak * n3 * n3 / 6.0
                fastest = speed - 0.5 * accel * accel / first if accel > 0.0 else speed
                return (first, n1, n2, peak / n3, n3), 0.0, end, end, end, fastest
            n1 += 1
        return None

    def viable_stop(self, position: float, speed: float, accel: float, slack: float) -> Stop | None:
        """The stop from here, if it keeps the limits of position (but for ``slack``) and speed."""
        if not -self.max_accel <= accel <= self.max_accel:
            return None
        stop = self.stop(speed, accel)
        if stop is None or stop[5] > self.max_speed:
            return None
        inside = position + stop[1] >= self.low - slack and position + stop[2] <= self.high + slack
        return stop if inside else None

    def toward(self, target: float, target_speed: float, motion: Motion, scale: float) -> float:
        """Acceleration after the next tick, on the way to where a moving ``target`` is at the next tick.

        The closing speed is the least of three: what half the acceleration can still stop, s = sqrt(A d); what a
        fraction of the jerk can stop, s = (J d^2 / 10)^(1/3), as the acceleration must be ramped out too; and a quarter
        of the distance per tick. ``target_speed`` is followed in part. ``scale`` in (0, 1] lowers the highest speed.
        """
        position, speed, accel = motion
        target_speed *= FOLLOWED
        gap = target - target_speed - position
        separation = gap if gap > 0.0 else -gap
        closing = 0.25 * separation
        if closing * closing > self._accel * separation:
            closing = sqrt(self._accel * separation)
        cube = 0.1 * self._ramp * separation * separation
        if cube < closing * closing * closing:
            closing = cube ** (1.0 / 3.0)
        wanted = target_speed + (closing if gap > 0.0 else -closing)
        fastest = self._speed * scale
        if not -fastest <= wanted <= fastest:
            wanted = fastest if wanted > 0.0 else -fastest
        return self._accelerate(wanted - speed, accel)

    def _accelerate(self, gap: float, accel: float) -> float:
        """Next acceleration w' that closes a gap of speed without overshoot: it is ramped out in one tick, w' / 2, or,
        where the jerk does not allow that, in w'^2 / (2 J) + w' / 2."""
        ramp, left = self._ramp, gap - 0.5 * accel
        size = left if left >= 0.0 else -left
        after = size if size <= ramp else ramp * (sqrt(0.25 + 2.0 * size / ramp) - 0.5)
        if after > self._accel:
            after = self._accel
        if left < 0.0:
            after = -after
        if after > accel + ramp:
            return accel + ramp
        return accel - ramp if after < accel - ramp else after

    def take_up_ticks(self, distance: float) -> int:
        """Ticks in which a controller moves by ``distance`` from rest to rest within the limits.

        It interpolates by a cubic (peak speed 1.5, acceleration 6, jerk 12 times distance / T, T^2, T^3) or a quintic
        spline (1.875, 5.774, 60). The cubic's acceleration begins and ends with a step, which a controller at
        ``CONTROLLER_HZ`` makes within one of its periods.
        """
        step = 6.0 * distance * self._dt * CONTROLLER_HZ / self._ramp
        return ceil(
            max(
                1.875 * distance / self._speed,
                sqrt(6.0 * distance / self._accel),
                (60.0 * distance / self._ramp) ** (1.0 / 3.0),
                sqrt(step),
            )
        )


def _with_extremes(speed: float, accel: float, peak: float, n1: int, n2: int, n3: int, flipped: bool) -> Stop:
    """The stop of these parts. Its speed may change sign only in the first part, in which the jerk is constant."""
    first, last = -(peak + accel) / n1, peak / n3
    at_first = n1 * (speed + n1 * (0.5 * accel + n1 * first / 6.0))
    after_first = speed + n1 * (accel + 0.5 * n1 * first)
    end = at_first + n2 * (after_first - 0.5 * peak * n2) + peak * n3 * n3 / 6.0
    fastest = max(abs(speed), abs(after_first))
    if first and 0.0 < -accel / first < n1:
        fastest = max(fastest, abs(speed - 0.5 * accel * accel / first))
    if speed >= 0.0 and peak >= 0.0:
        lowest, highest, distance = 0.0, end, end
    else:
        path = [0.0, *(t * (speed + t * (0.5 * accel + t * first / 6.0)) for t in _turns(speed, accel, first, n1))]
        path += [at_first, end]
        lowest, highest = min(path), max(path)
        distance = sum([abs(b - a) for a, b in pairwise(path)])
    if flipped:
        return (-first, n1, n2, -last, n3), -highest, -lowest, -end, distance, fastest
    return (first, n1, n2, last, n3), lowest, highest, end, distance, fastest


def _turns(speed: float, accel: float, jerk: float, ticks: int) -> list[float]:
    """When the speed is zero within the first ``ticks`` of this motion, in order."""
    square = accel * accel - 2.0 * jerk * speed
    if square < 0.0:
        return []
    half = -0.5 * (accel + (sqrt(square) if accel >= 0.0 else -sqrt(square)))
    roots = [half / (0.5 * jerk)] if jerk else []
    roots += [speed / half] if half else []
    return sorted(t for t in roots if 0.0 < t < ticks)
