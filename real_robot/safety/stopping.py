"""Braking of one axis in discrete time, limited in velocity, acceleration and jerk.

All quantities are finite differences of the commanded positions, which are the controller's only input:

    v[k] = (q[k] - q[k-1]) / dt      a[k] = (v[k] - v[k-1]) / dt      jerk[k] = (a[k] - a[k-1]) / dt

**The stop law.** From speed s > 0 the largest deceleration p that can still be ramped out to zero without crossing
zero speed fulfils s / dt = p + (p - r) + (p - 2r) + ... over the positive terms, where r = jerk * dt. With n whole
ramp steps that is s / dt = (n + 1) p - r n (n + 1) / 2, solved for p in closed form. Applying p leaves exactly the
speed whose own p is p - r: the law follows its own curve, ends at v = a = 0, and depends on (v, a) alone.

**Viability.** A state is viable if the stop law, started there, stays inside the limits. Its successor under the
stop law is the rest of the same stop and therefore viable too. A filter that moves only to viable states, and applies
the stop law when it finds no other, never exceeds a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, sqrt

# Planning leaves a small part of each limit unused, so that rounding in the finite differences never exceeds it.
_PLANNING = 1.0 - 1e-6
# Below this a step [rad or m] is the rounding of a position, not a motion.
MIN_STEP = 4e-15


@dataclass(frozen=True, kw_only=True)
class AxisLimits:
    """Limits of one joint. Units are rad or m, and per second; ``unit`` says which.

    ``step_from_measured``: largest distance of a command from the measured position.
    ``contact_residual``: largest external torque or force [N m or N]; None if the robot reports none.
    """

    name: str
    unit: str
    position: tuple[float, float]
    velocity: float
    acceleration: float
    jerk: float
    step_from_measured: float
    contact_residual: float | None = None


# Plain tuples, as hundreds are made in every tick near a face of the workspace.
# The course of a stop: position and path length after each tick until it is on the stop law's curve, the speed there,
# then speed / dt and ticks with the full acceleration, and speed / dt, ticks and first deceleration of the rest.
Curve = tuple[list[tuple[float, float]], float, float, int, float, int, float]
# A stop, relative to its start: lowest and highest position, end position, path length, highest speed, ticks, course.
Stop = tuple[float, float, float, float, float, int, Curve]


class Axis:
    """The stop law and the viability of one joint at a fixed command period ``dt`` [s]."""

    __slots__ = (
        *("dt", "high", "low", "max_accel", "max_accel_step", "max_speed"),
        *(
            "_accel",
            "_full_rate",
            "_jerk_10",
            "_per_accel_2",
            "_per_jerk",
            "_per_jerk_2",
            "_ramp",
            "_ramps_s",
            "_speed",
        ),
    )

    def __init__(self, limits: AxisLimits, dt: float) -> None:
        self.dt = dt
        self.low, self.high = limits.position
        self.max_accel = limits.acceleration
        self.max_accel_step = limits.jerk * dt
        self.max_speed = limits.velocity
        self._speed = limits.velocity * _PLANNING
        self._accel = limits.acceleration * _PLANNING
        self._ramp = limits.jerk * dt * _PLANNING
        self._jerk_10 = 0.1 * limits.jerk
        self._per_accel_2, self._per_jerk, self._per_jerk_2 = 0.5 / self._accel, dt / self._ramp, 0.5 * dt / self._ramp
        self._ramps_s = 2.0 * (dt + self._accel * dt / self._ramp)
        # s / dt from which on the stop law brakes with all of the acceleration
        whole = floor(self._accel / self._ramp)
        self._full_rate = (whole + 1) * (self._accel - 0.5 * self._ramp * whole)

    def accelerate(self, speed_gap: float, accel: float) -> float:
        """Next acceleration that closes ``speed_gap`` fastest without overshoot, from acceleration ``accel``."""
        ramp = self._ramp
        rate = (speed_gap if speed_gap >= 0.0 else -speed_gap) / self.dt
        if rate >= self._full_rate:
            peak = self._accel
        elif rate < ramp:
            peak = rate
        else:
            n = int((sqrt(1.0 + 8.0 * rate / ramp) - 1.0) * 0.5)
            peak = (rate + ramp * n * (n + 1) * 0.5) / (n + 1)
        if speed_gap < 0.0:
            peak = -peak
        if peak > accel + ramp:
            return accel + ramp
        return accel - ramp if peak < accel - ramp else peak

    def brake(self, speed: float, accel: float) -> float:
        """Next acceleration of the stop law."""
        return self.accelerate(-speed, accel)

    def braked(self, position: float, speed: float, accel: float) -> tuple[float, float, float]:
        """Position, speed and acceleration after one tick of the stop law; exactly at rest at its end."""
        if not speed and not accel:
            return position, 0.0, 0.0
        dt = self.dt
        step = (speed + self.accelerate(-speed, accel) * dt) * dt
        after = position + step if not -MIN_STEP <= step <= MIN_STEP else position
        speed_after = (after - position) / dt
        return after, speed_after, (speed_after - speed) / dt

    def stop(self, speed: float, accel: float) -> Stop:
        """The stop from (speed, accel): step by step until it is on the stop law's curve, the rest in closed form.

        On the curve it brakes m times with the full acceleration A, while s / dt is at least what A can ramp out, and
        then n times with p, p - r, ... Summing the speeds gives, with R = s / dt where a part begins, for the first
        m R - A m (m + 1) / 2 and for the second n R - p n (n + 1) / 2 + r (n - 1) n (n + 1) / 6, each times dt^2.
        """
        dt, ramp, most, full = self.dt, self._ramp, self._accel, self._full_rate
        position = lowest = highest = distance = 0.0
        ramped = []
        size = fastest = speed if speed >= 0.0 else -speed
        while True:
            rate = size / dt
            n, peak = 0, rate
            if rate >= full:
                peak = most
            elif rate >= ramp:
                n = int((sqrt(1.0 + 8.0 * rate / ramp) - 1.0) * 0.5)
                peak = (rate + ramp * n * (n + 1) * 0.5) / (n + 1)
            gap = (-peak if speed > 0.0 else peak) - accel
            if -ramp <= gap <= ramp:
                break
            accel += ramp if gap > 0.0 else -ramp
            speed += accel * dt
            size = speed if speed >= 0.0 else -speed
            position += speed * dt
            distance += size * dt
            ramped.append((position, distance))
            if position > highest:
                highest = position
            elif position < lowest:
                lowest = position
            if size > fastest:
                fastest = size
        m, last_rate, curve = 0, rate, 0.0
        if rate >= full:
            m = int((rate - full) / most) + 1
            curve = m * (rate - 0.5 * most * (m + 1))
            last_rate = rate - m * most
            if last_rate >= ramp:
                n = int((sqrt(1.0 + 8.0 * last_rate / ramp) - 1.0) * 0.5)
                peak = (last_rate + ramp * n * (n + 1) * 0.5) / (n + 1)
        if n:
            curve += n * (last_rate - (n + 1) * (0.5 * peak - ramp * (n - 1) / 6.0))
        curve *= dt * dt
        end = position + curve if speed > 0.0 else position - curve
        if end > highest:
            highest = end
        elif end < lowest:
            lowest = end
        ticks = len(ramped) + m + n
        return lowest, highest, end, distance + curve, fastest, ticks + 1, (ramped, speed, rate, m, last_rate, n, peak)

    def along(self, curve: Curve, ticks: int) -> tuple[float, float]:
        """Position of a stop after ``ticks`` >= 1, relative to its start, and the path length up to there."""
        ramped, direction, rate, full_ticks, last_rate, last_ticks, peak = curve
        position = distance = 0.0
        if ramped:
            if ticks <= len(ramped):
                return ramped[ticks - 1]
            position, distance = ramped[-1]
            ticks -= len(ramped)
        m = ticks if ticks < full_ticks else full_ticks
        offset = m * (rate - 0.5 * self._accel * (m + 1))
        if ticks > m:
            n = ticks - m if ticks - m < last_ticks else last_ticks
            offset += n * (last_rate - (n + 1) * (0.5 * peak - self._ramp * (n - 1) / 6.0))
        offset *= self.dt * self.dt
        return (position + offset if direction > 0.0 else position - offset), distance + offset

    def stopping_distance(self, position: float, speed: float, accel: float, slack: float) -> float | None:
        """An upper bound of the stop's path length; None if it breaks a limit of velocity or position by more than
        ``slack``.

        No stop from (s, a) is faster than v = s + a^2 / (2 J), and none is longer than v^2 / (2 A) at full deceleration
        plus v for as long as the acceleration is ramped from a to A and out again, plus a tick for each. Only where
        that is not within the limits the stop itself is computed.
        """
        accel_size = accel if accel >= 0.0 else -accel
        peak = (speed if speed >= 0.0 else -speed) + accel_size * accel_size * self._per_jerk_2
        distance = peak * (peak * self._per_accel_2 + self._ramps_s + accel_size * self._per_jerk)
        if peak <= self.max_speed and position + distance <= self.high and position - distance >= self.low:
            return distance
        lowest, highest, _, distance, fastest, _, _ = self.stop(speed, accel)
        inside = position + highest <= self.high + slack and position + lowest >= self.low - slack
        return distance if inside and fastest <= self.max_speed + slack else None

    def toward(self, target: float, target_speed: float, position: float, speed: float, accel: float) -> float:
        """Next acceleration that approaches a moving ``target`` and reaches it without overshoot.

        The closing speed is the least of three: the speed that half the acceleration can still stop, s = sqrt(A d);
        the speed that a fraction of the jerk can stop, s = (J d^2 / 10)^(1/3), as the acceleration must be ramped out
        too; and a third of the distance per period. The margins allow for the lag of the acceleration.
        """
        gap = target - position
        separation = gap if gap > 0.0 else -gap
        closing = separation / (3.0 * self.dt)
        if closing * closing > self._accel * separation:
            closing = sqrt(self._accel * separation)
        cube = self._jerk_10 * separation * separation
        if cube < closing * closing * closing:
            closing = cube ** (1.0 / 3.0)
        wanted = target_speed + (closing if gap > 0.0 else -closing)
        fastest = self._speed
        if not -fastest <= wanted <= fastest:
            wanted = fastest if wanted > 0.0 else -fastest
        return self.accelerate(wanted - speed, accel)
