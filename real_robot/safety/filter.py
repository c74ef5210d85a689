"""One pure, deterministic filter between every source of commands (policy or human) and the controller.

Every command tick goes through ``SafetyFilter.filter``: a command that breaks a hard rule is rejected as a whole and
the arm brakes; one that is only too far or too fast is followed as closely as the limits allow. The positions that come
out, tick by tick, never exceed a limit of position, velocity, acceleration or jerk, and a stop that keeps all limits is
always possible (see ``real_robot.safety.stopping``). Every change is reported as an event.

This is a *protective hold* in software. It is not an emergency stop and not certified.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, isfinite, nan

from real_robot.safety.commands import Command, Measurement, SafeCommand, SafetyEvent
from real_robot.safety.limits import RobotLimits
from real_robot.safety.stopping import Axis
from real_robot.safety.workspace import WorkspaceCheck

State = tuple[list[float], list[float], list[float]]  # positions, speeds, accelerations of every joint

# A command may pass unchanged this close to its limits: rad or m, and rad/s or m/s.
_SLACK = 1e-9


class SafetyFilter:
    """One robot's filter. Call it every tick, with or without a command; it keeps the commanded state.

    Ticks are on the grid start + k / command_hz. A late call has missed ticks: the controller was then executing the
    stop path that every command carries, so the filter advances along that path too.
    """

    def __init__(self, limits: RobotLimits) -> None:
        self.limits = limits
        self.dt = 1.0 / limits.command_hz
        self._axes = [Axis(axis, self.dt) for axis in limits.axes]
        self._steps = [axis.step_from_measured for axis in limits.axes]
        self._residuals = [(i, r) for i, r in enumerate(axis.contact_residual for axis in limits.axes) if r is not None]
        box = limits.workspace
        self._workspace = WorkspaceCheck(box, limits.axes, self._axes) if box else None
        self._stop_reason: str | None = None
        self._started = False

    def start(self, positions: Sequence[float], now_s: float) -> None:
        """The measured position becomes the commanded one, at rest. ValueError if it is not inside the limits."""
        if self._started and not self.at_rest:
            raise ValueError(
                "the commanded motion has not come to rest: call filter(None, ...) until at_rest, then start"
            )
        axes = self.limits.axes
        if len(positions) != len(axes):
            raise ValueError(f"{len(positions)} joint positions were measured, the limits name {len(axes)} joints")
        for axis, q in zip(axes, positions, strict=True):
            low, high = axis.position
            if not low <= q <= high:
                raise ValueError(
                    f"joint {axis.name!r} is at {q:.4f} {axis.unit}, allowed is {low} to {high}; move it inside by hand"
                )
        if self._workspace and self._workspace.depth(positions)[0] < 0.0:
            where = ", ".join(f"{x:.3f}" for x in self._workspace.position(positions))
            raise ValueError(
                f"the end effector is at ({where}) m, outside the workspace box; move the arm inside by hand"
            )
        n = len(axes)
        self._commit(([float(q) for q in positions], [0.0] * n, [0.0] * n), positions, accepted=False)
        self._time_s, self._tick, self._started = now_s, 0, True
        self._last = SafeCommand(0, tuple(self._state[0]), (0.0,) * n, (0.0,) * n, False, ())

    @property
    def at_rest(self) -> bool:
        """Whether speed and acceleration of every joint are zero."""
        return not any(self._state[1]) and not any(self._state[2])

    @property
    def positions(self) -> tuple[float, ...]:
        """Commanded position of every joint at this tick."""
        return tuple(self._state[0])

    @property
    def stopped(self) -> str | None:
        """Why the stop is latched, or None."""
        return self._stop_reason

    def stop(self, reason: str) -> None:
        """Latch a protective hold: brake now, accept nothing until ``release``. The first reason is kept."""
        self._stop_reason = self._stop_reason or reason

    def release(self) -> None:
        """Unlatch the stop. ValueError while the arm is still braking."""
        if self._started and not self.at_rest:
            raise ValueError("the arm is still braking; release the stop when it is at rest")
        self._stop_reason = None

    def filter(self, command: Command | None, measured: Measurement | None, now_s: float) -> SafeCommand:
        """The command for the tick at ``now_s``. Never raises on bad input; RuntimeError before ``start``.

        A call within half a period of the previous tick changes nothing and returns that tick's command again.
        """
        if not self._started:
            raise RuntimeError("the arm's position is not known: call start(positions, now_s) first")
        events: list[SafetyEvent] = []
        if not self._advance_clock(now_s, events):
            return self._last._replace(events=tuple(events))
        rejection = self._rejection(command, measured, now_s)
        if rejection is None:
            assert command is not None
            state, distances = self._follow(command.positions, events)
            rejection = self._workspace.violation(*state, distances) if self._workspace else None
        accepted = rejection is None
        if rejection is not None:
            events.append(rejection)
            state = self._braked(self._state)
            if rejection.reason == "contact":
                self.stop(f"contact at joint {rejection.joint}")
        self._commit(state, command.positions if accepted and command else state[0], accepted=accepted)
        positions, speeds, accels = state
        self._last = SafeCommand(self._tick, tuple(positions), tuple(speeds), tuple(accels), accepted, tuple(events))
        return self._last

    def stop_path(self) -> list[tuple[list[float], list[float]]]:
        """Positions and velocities of the coming ticks if no further command arrives, down to rest.

        It is sent with every command, so that the controller can finish the stop if this process dies.
        """
        path = []
        state = self._state
        while any(state[1]) or any(state[2]):
            state = self._braked(state)
            path.append((state[0], state[1]))
        return path

    def _advance_clock(self, now_s: float, events: list[SafetyEvent]) -> bool:
        """Move to the tick nearest to ``now_s``; False if that is not a new one."""
        passed = (now_s - self._time_s) * self.limits.command_hz
        if 0.5 <= passed < 1.5:
            self._time_s += self.dt
            self._tick += 1
            return True
        if passed >= 1.5 and isfinite(passed):
            missed = round(passed) - 1
            events.append(SafetyEvent("missed_ticks", None, missed, 0.0))
            self._brake_through(missed)
            self._time_s += (missed + 1) * self.dt
            self._tick += missed + 1
            return True
        if -0.5 < passed < 0.5:
            events.append(SafetyEvent("early_tick", None, now_s, self._time_s))
            return False
        events.append(SafetyEvent("clock_jump", None, now_s, self._time_s))
        self.stop("the clock is not finite or ran backwards")
        if isfinite(now_s):
            self._time_s = now_s
        self._tick += 1
        return True

    def _brake_through(self, ticks: int) -> None:
        for _ in range(ticks):
            if self.at_rest:
                break
            state = self._braked(self._state)
            self._commit(state, state[0], accepted=False)

    def _rejection(self, command: Command | None, measured: Measurement | None, now_s: float) -> SafetyEvent | None:
        """The first hard rule that this tick breaks. Comparisons are written so that NaN breaks the rule."""
        limits = self.limits
        if self._stop_reason is not None:
            return SafetyEvent("stopped", None, 0.0, 0.0)
        if command is None:
            return SafetyEvent("no_command", None, 0.0, 0.0)
        age = now_s - command.stamp_s
        if not abs(age) <= limits.max_command_age_s:
            return SafetyEvent("command_stale", None, age, limits.max_command_age_s)
        age = now_s - measured.stamp_s if measured else inf
        if measured is None or not abs(age) <= limits.max_measurement_age_s:
            return SafetyEvent("measurement_stale", None, age, limits.max_measurement_age_s)
        if not len(command.positions) == len(measured.positions) == len(limits.axes):
            return SafetyEvent("joint_count", None, len(command.positions), len(limits.axes))
        for i, (step, q, m) in enumerate(zip(self._steps, command.positions, measured.positions, strict=True)):
            if not -step <= q - m <= step:
                finite = isfinite(q) and isfinite(m)
                return SafetyEvent("step_from_measured" if finite else "not_finite", i, q - m, step)
        return self._contact(measured.residuals)

    def _contact(self, residuals: Sequence[float] | None) -> SafetyEvent | None:
        """A residual above its limit, or a residual that has a limit and was not measured."""
        for i, limit in self._residuals:
            residual = residuals[i] if residuals is not None and i < len(residuals) else nan
            if not -limit <= residual <= limit:
                return SafetyEvent("contact", i, residual, limit)
        return None

    def _follow(self, wanted: Sequence[float], events: list[SafetyEvent]) -> tuple[State, list[float]]:
        """Each joint to its wanted position or as close as the limits allow; and upper bounds of stopping distances."""
        dt = self.dt
        positions, speeds, accels, distances = [], [], [], []
        joints = zip(self._axes, wanted, *self._state, self._catching_up, strict=True)
        for i, (axis, target, q, v, a, catching_up) in enumerate(joints):
            if not axis.low - _SLACK <= target <= axis.high + _SLACK:
                bound = axis.low if target < axis.low else axis.high
                events.append(SafetyEvent("position", i, target, bound))
                target = bound
            speed = (target - q) / dt
            accel = (speed - v) / dt
            distance = None
            if -axis.max_accel <= accel <= axis.max_accel and -axis.max_accel_step <= accel - a <= axis.max_accel_step:
                distance = axis.stopping_distance(target, speed, accel, _SLACK)
            if catching_up or distance is None:
                target, speed, accel, distance = self._catch_up(i, target, speed, accel, distance, events)
            positions.append(target)
            speeds.append(speed)
            accels.append(accel)
            distances.append(distance)
        return (positions, speeds, accels), distances

    def _catch_up(
        self, i: int, target: float, speed: float, accel: float, distance: float | None, events: list[SafetyEvent]
    ) -> tuple[float, float, float, float]:
        """Joint ``i`` towards a target that it cannot (``distance`` is None) or should not yet reach in this tick.

        It reaches the target only when it can match the target's own speed in the next tick; otherwise it would
        overshoot.
        """
        axis, dt = self._axes[i], self.dt
        (positions, speeds, accels), last = self._state, self._targets[i]
        q, v, a = positions[i], speeds[i], accels[i]
        if not axis.low <= last <= axis.high:
            last = axis.low if last < axis.low else axis.high
        target_speed = (target - last) / dt
        if not -axis.max_speed <= target_speed <= axis.max_speed:
            target_speed = axis.max_speed if target_speed > 0.0 else -axis.max_speed
        if distance is None:
            events.append(_broken_limit(i, axis, target, speed, accel, a))
        else:
            settling = (target_speed - speed) / dt
            if abs(settling) <= axis.max_accel and abs(settling - accel) <= axis.max_accel_step >= abs(settling):
                self._catching_up[i] = False
                return target, speed, accel, distance
            events.append(SafetyEvent("catching_up", i, target - q, 0.0))
        self._catching_up[i] = True
        closer = axis.toward(target - target_speed * dt, target_speed, q, v, a)  # where both are now
        position = q + (v + closer * dt) * dt
        speed = (position - q) / dt
        accel = (speed - v) / dt
        distance = axis.stopping_distance(position, speed, accel, 0.0)
        if distance is None:
            position, speed, accel = axis.braked(q, v, a)
            distance = axis.stop(speed, accel)[3]
        return position, speed, accel, distance

    def _braked(self, state: State) -> State:
        """The next state of the stop law, every joint."""
        positions, speeds, accels = [], [], []
        for axis, q, v, a in zip(self._axes, *state, strict=True):
            position, speed, accel = axis.braked(q, v, a)
            positions.append(position)
            speeds.append(speed)
            accels.append(accel)
        return positions, speeds, accels

    def _commit(self, state: State, targets: Sequence[float], *, accepted: bool) -> None:
        self._state = state
        self._targets = list(targets)
        if not accepted:
            self._catching_up = [False] * len(self._axes)


def _broken_limit(joint: int, axis: Axis, target: float, speed: float, accel: float, old_accel: float) -> SafetyEvent:
    """The limit that prevents ``joint`` from being at ``target`` now."""
    if not -axis.max_speed <= speed <= axis.max_speed:
        return SafetyEvent("velocity", joint, speed, axis.max_speed)
    if not -axis.max_accel <= accel <= axis.max_accel:
        return SafetyEvent("acceleration", joint, accel, axis.max_accel)
    if not -axis.max_accel_step <= accel - old_accel <= axis.max_accel_step:
        return SafetyEvent("jerk", joint, (accel - old_accel) / axis.dt, axis.max_accel_step / axis.dt)
    return SafetyEvent("braking_distance", joint, target, axis.high if speed > 0.0 else axis.low)
