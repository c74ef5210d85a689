"""Braking of one axis in discrete time, limited in velocity, acceleration and jerk.

Everything is stated in finite differences of the commanded positions, the only thing a controller sees:

    v[k] = (q[k] - q[k-1]) / dt      a[k] = (v[k] - v[k-1]) / dt      jerk[k] = (a[k] - a[k-1]) / dt

**The stop law.** From speed s > 0 the largest deceleration p that can still be ramped out to zero without crossing
zero speed fulfils s / dt = p + (p - r) + (p - 2r) + ... over the positive terms, where r = jerk * dt. With n whole
ramp steps that is s / dt = (n + 1) p - r n (n + 1) / 2, solved for p in closed form. Applying p leaves exactly the
speed whose own p is p - r: the law follows its own curve, ends at v = a = 0, and depends on (v, a) alone.

**Viability.** A state is viable if the stop law, started there, stays inside the limits. Its successor under the
stop law is the tail of the same stop and therefore viable too. A filter that only ever moves to viable states, and
applies the stop law when it finds no other, can never be forced over a limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, sqrt

# Planning leaves this much of each limit unused, so that rounding in the finite differences never crosses it.
_PLANNING = 1.0 - 1e-6
# Below this a step [rad or m] is the rounding of a position, not a motion.
STILL = 4e-15


@dataclass(frozen=True, kw_only=True)
class AxisLimits:
    """Limits of one joint. Units are rad or m, and per second; ``unit`` says which.

    ``step_from_measured``: farthest a command may lie from where the joint is measured to be.
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


class Axis:
    """The stop law and the viability of one joint at a fixed command period ``dt`` [s]."""

    __slots__ = (
        *("dt", "high", "low", "max_accel", "max_accel_step", "max_speed"),
        *("_accel", "_brake", "_jerk_10", "_ramp", "_speed"),
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
        self._brake = limits.acceleration / limits.jerk
        self._jerk_10 = 0.1 * limits.jerk

    def accelerate(self, speed_gap: float, accel: float) -> float:
        """Next acceleration that closes ``speed_gap`` soonest without overshooting it, from acceleration ``accel``."""
        ramp, rate = self._ramp, abs(speed_gap) / self.dt
        n = int((sqrt(1.0 + 8.0 * rate / ramp) - 1.0) * 0.5)
        peak = (rate + ramp * n * (n + 1) * 0.5) / (n + 1)
        if peak > self._accel:
            peak = self._accel
        if speed_gap < 0.0:
            peak = -peak
        if peak > accel + ramp:
            return accel + ramp
        return accel - ramp if peak < accel - ramp else peak

    def stop(self, speed: float, accel: float) -> float:
        """Next acceleration of the stop law."""
        return self.accelerate(-speed, accel)

    def speed_gain(self, accel: float) -> float:
        """Speed still gained while ``accel`` >= 0 is ramped out, after the current step."""
        n = floor(accel / self._ramp)
        return self.dt * n * (accel - self._ramp * (n + 1) * 0.5)

    def travel_bound(self, speed: float, accel: float) -> float:
        """Upper bound of how far the stop law still moves in the positive direction; cheap, at most a little long.

        Peak speed for as long as the acceleration is being ramped out, then the continuous trapezoid's distance
        s^2 / 2A + s A / 2J, and one period for the sampling.
        """
        delay = self.dt
        if accel > 0.0:
            speed += self.speed_gain(accel)
            delay += accel / self._ramp * self.dt
        if speed <= 0.0:
            return 0.0
        return speed * (delay + 0.5 * (speed / self._accel + self._brake))

    def travel(self, speed: float, accel: float) -> tuple[float, float]:
        """Lowest and highest displacement along the stop from (speed, accel), by following it. O(steps)."""
        position = lowest = highest = 0.0
        for step in self.stop_steps(speed, accel):
            position += step
            if position > highest:
                highest = position
            elif position < lowest:
                lowest = position
        return lowest, highest

    def stop_steps(self, speed: float, accel: float) -> list[float]:
        """Displacement of every period until rest."""
        steps = []
        while abs(speed) * self.dt > STILL or abs(accel) > self._ramp:
            accel = self.stop(speed, accel)
            speed += accel * self.dt
            steps.append(speed * self.dt)
        return steps

    def viable(self, position: float, speed: float, accel: float, slack: float) -> bool:
        """Whether the stop from this state keeps velocity and position inside the limits, to within ``slack``."""
        peak = speed + self.speed_gain(accel) if accel > 0.0 else speed - self.speed_gain(-accel)
        fastest = self.max_speed + slack
        if not (-fastest <= peak <= fastest and -fastest <= speed <= fastest):
            return False
        room_up, room_down = self.high - position + slack, position - self.low + slack
        if room_up < 0.0 or room_down < 0.0:
            return False
        if self.travel_bound(speed, accel) <= room_up and self.travel_bound(-speed, -accel) <= room_down:
            return True
        lowest, highest = self.travel(speed, accel)
        return highest <= room_up and -lowest <= room_down

    def toward(self, target: float, target_speed: float, position: float, speed: float, accel: float) -> float:
        """Next acceleration that approaches a moving ``target`` and lands on it without passing it.

        The closing speed is the least of three: what half the acceleration can still stop, s = sqrt(A d); what a
        fraction of the jerk can, s = (J d^2 / 10)^(1/3), as the acceleration must be ramped out too; and a third of
        the way per period. The margins are for the lag of the acceleration behind the speed wanted here.
        """
        gap = target - position
        reach = abs(gap)
        closing = min(
            reach / (3.0 * self.dt), sqrt(self._accel * reach), (self._jerk_10 * reach * reach) ** (1.0 / 3.0)
        )
        wanted = target_speed + (closing if gap > 0.0 else -closing)
        wanted = max(-self._speed, min(self._speed, wanted))
        return self.accelerate(wanted - speed, accel)
