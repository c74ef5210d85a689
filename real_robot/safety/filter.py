"""The last thing before the wire: one pure, deterministic filter for policy and human alike.

Every control tick goes through ``SafetyFilter.filter``: a command that breaks a hard rule is rejected whole and the
arm brakes; one that is only too far or too fast is followed as closely as the limits allow. Either way the positions
that come out, taken tick by tick, never exceed a limit of position, velocity, acceleration or jerk, and a stop that
keeps them all is always at hand (see ``real_robot.safety.stopping``). Nothing changes without an event that says why.

This is a *protective hold* in software. It is not an emergency stop, and it is not certified for anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Literal, NamedTuple

from real_robot.safety.kinematics import JointFrame, Levers, ToolPoint, Vector, longest_way
from real_robot.safety.stopping import Axis, AxisLimits, Curve

Rejection = Literal[  # the whole command is dropped and every joint brakes
    "stopped",
    "no_command",
    "command_stale",
    "measurement_stale",
    "joint_count",
    "not_finite",
    "step_from_measured",
    "contact",
    "workspace",
]
Clamp = Literal["position", "velocity", "acceleration", "jerk", "braking_distance", "catching_up"]  # one joint, limited
Timing = Literal["missed_ticks", "early_tick", "clock_jump"]  # what happened to the ticks themselves

State = tuple[list[float], list[float], list[float]]  # positions, speeds, accelerations of every joint

Point = tuple[int, float, Sequence[float]]  # of a stop: its tick, the tool's depth in the box, each joint's way there

# How close to its limits a command may pass unchanged: rad or m, and rad/s or m/s.
_SLACK = 1e-9


@dataclass(frozen=True, kw_only=True)
class Workspace:
    """Box the tool point must stay in, base frame [m]."""

    low: Vector
    high: Vector
    frames: tuple[JointFrame, ...]
    tool: Vector = (0.0, 0.0, 0.0)


@dataclass(frozen=True, kw_only=True)
class RobotLimits:
    """What the filter enforces. ``command_hz``: rate of the ticks; ages are seconds."""

    command_hz: float
    axes: tuple[AxisLimits, ...]
    workspace: Workspace | None
    max_command_age_s: float
    max_measurement_age_s: float


class Command(NamedTuple):
    """Where each joint should be at this tick [rad or m], and when that was decided [s, the filter's clock]."""

    positions: Sequence[float]
    stamp_s: float


class Measurement(NamedTuple):
    """Where each joint is, when that was measured, and the external torque or force where the robot reports it."""

    positions: Sequence[float]
    stamp_s: float
    residuals: Sequence[float] | None = None


class SafetyEvent(NamedTuple):
    """One change the filter made. ``joint``: index, or None for the whole command. ``value`` broke ``limit``."""

    reason: Rejection | Clamp | Timing
    joint: int | None
    value: float
    limit: float


class SafeCommand(NamedTuple):
    """What goes to the controller for ``tick``. ``accepted``: the policy's command was used, clamped or not."""

    tick: int
    positions: tuple[float, ...]
    velocities: tuple[float, ...]
    accelerations: tuple[float, ...]
    accepted: bool
    events: tuple[SafetyEvent, ...]


class SafetyFilter:
    """One robot's filter. Give it every tick, with or without a command; it keeps the commanded state.

    Ticks lie on the grid start + k / command_hz. A call that comes late has missed ticks: the controller was then
    executing the stop path that every command carries, and so the filter advances along that path too.
    """

    def __init__(self, limits: RobotLimits) -> None:
        self.limits = limits
        self.dt = 1.0 / limits.command_hz
        self._axes = [Axis(axis, self.dt) for axis in limits.axes]
        self._steps = [axis.step_from_measured for axis in limits.axes]
        self._residuals = [(i, r) for i, r in enumerate(axis.contact_residual for axis in limits.axes) if r is not None]
        box = limits.workspace
        self._tool = ToolPoint(box.frames, box.tool, limits.axes) if box else None
        self._stop_reason: str | None = None
        self._started = False

    def start(self, positions: Sequence[float], now_s: float) -> None:
        """Take the measured position as the commanded one, at rest. ValueError if it is not inside the limits."""
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
        if self._tool and self._depth(positions)[0] < 0.0:
            where = ", ".join(f"{x:.3f}" for x in self._tool(positions))
            raise ValueError(f"the tool is at ({where}) m, outside the workspace box; move the arm inside by hand")
        n = len(axes)
        self._commit(([float(q) for q in positions], [0.0] * n, [0.0] * n), positions, accepted=False)
        self._time_s, self._tick, self._started = now_s, 0, True
        self._last = SafeCommand(0, tuple(self._state[0]), (0.0,) * n, (0.0,) * n, False, ())

    @property
    def at_rest(self) -> bool:
        """Whether the next period moves nothing if nothing is commanded."""
        return not any(self._state[1]) and not any(self._state[2])

    @property
    def positions(self) -> tuple[float, ...]:
        """Where every joint is commanded to be now."""
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
        """The command for the tick at ``now_s``. Never raises on what comes in from outside; needs ``start``.

        A call within half a period of the previous tick changes nothing and returns that tick's command again.
        """
        if not self._started:
            raise RuntimeError("the filter does not know where the arm is: call start(positions, now_s) first")
        events: list[SafetyEvent] = []
        if not self._advance_clock(now_s, events):
            return self._last._replace(events=tuple(events))
        rejection = self._rejection(command, measured, now_s)
        if rejection is None:
            assert command is not None
            state, ways = self._follow(command.positions, events)
            rejection = self._leaves_workspace(state, ways) if self._tool else None
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
        """Positions and velocities of the coming ticks if nothing more is commanded, down to rest.

        Sent along with every command, it lets the controller itself finish the stop when this process dies.
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
        """The first hard rule that this tick breaks. Comparisons are written so that NaN breaks them."""
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
        """A residual above its limit, or one that has a limit and was not measured."""
        for i, limit in self._residuals:
            residual = residuals[i] if residuals is not None and i < len(residuals) else nan
            if not -limit <= residual <= limit:
                return SafetyEvent("contact", i, residual, limit)
        return None

    def _follow(self, wanted: Sequence[float], events: list[SafetyEvent]) -> tuple[State, list[float]]:
        """Each joint to its wanted position if the limits allow, else as close as they do; and the way of its stop."""
        dt = self.dt
        positions, speeds, accels, ways = [], [], [], []
        joints = zip(self._axes, wanted, *self._state, self._catching_up, strict=True)
        for i, (axis, target, q, v, a, catching_up) in enumerate(joints):
            if not axis.low - _SLACK <= target <= axis.high + _SLACK:
                bound = axis.low if target < axis.low else axis.high
                events.append(SafetyEvent("position", i, target, bound))
                target = bound
            speed = (target - q) / dt
            accel = (speed - v) / dt
            way = None
            if -axis.max_accel <= accel <= axis.max_accel and -axis.max_accel_step <= accel - a <= axis.max_accel_step:
                way = axis.stopping_way(target, speed, accel, _SLACK)
            if catching_up or way is None:
                target, speed, accel, way = self._catch_up(i, target, speed, accel, way, events)
            positions.append(target)
            speeds.append(speed)
            accels.append(accel)
            ways.append(way)
        return (positions, speeds, accels), ways

    def _catch_up(
        self, i: int, target: float, speed: float, accel: float, way: float | None, events: list[SafetyEvent]
    ) -> tuple[float, float, float, float]:
        """Joint ``i`` towards a target that it cannot (``way`` is None) or should not yet reach in this tick.

        Reaching it is put off until the next tick can also take on the target's own speed: jumping onto it any
        sooner would throw the joint past it.
        """
        axis, dt = self._axes[i], self.dt
        (positions, speeds, accels), last = self._state, self._targets[i]
        q, v, a = positions[i], speeds[i], accels[i]
        if not axis.low <= last <= axis.high:
            last = axis.low if last < axis.low else axis.high
        target_speed = (target - last) / dt
        if not -axis.max_speed <= target_speed <= axis.max_speed:
            target_speed = axis.max_speed if target_speed > 0.0 else -axis.max_speed
        if way is None:
            events.append(_what_is_broken(i, axis, target, speed, accel, a))
        else:
            settling = (target_speed - speed) / dt
            if abs(settling) <= axis.max_accel and abs(settling - accel) <= axis.max_accel_step >= abs(settling):
                self._catching_up[i] = False
                return target, speed, accel, way
            events.append(SafetyEvent("catching_up", i, target - q, 0.0))
        self._catching_up[i] = True
        closer = axis.toward(target - target_speed * dt, target_speed, q, v, a)  # where both are now
        position = q + (v + closer * dt) * dt
        speed = (position - q) / dt
        accel = (speed - v) / dt
        way = axis.stopping_way(position, speed, accel, 0.0)
        if way is None:
            position, speed, accel = axis.braked(q, v, a)
            way = axis.stop(speed, accel)[3]
        return position, speed, accel, way

    def _leaves_workspace(self, state: State, ways: Sequence[float]) -> SafetyEvent | None:
        """Whether the tool would be outside the box at this tick or at any tick of the stop that follows it.

        Between two points of the stop that are, together, deeper inside the box than the way between them is long, it
        stays inside. Where that leaves a doubt a point between the two is looked at. ``ways``: of the joints' stops.
        """
        positions, speeds, accels = state
        depth, levers = self._depth(positions)
        if 0.0 <= depth < longest_way(levers, ways):
            stops = [axis.stop(v, a) for axis, v, a in zip(self._axes, speeds, accels, strict=True)]
            swept = [stop[3] for stop in stops]
            depth_at_end, levers = self._depth([q + stop[2] for q, stop in zip(positions, stops, strict=True)])
            if 0.0 <= depth_at_end < longest_way(levers, swept) - depth:
                last, curves = max([stop[5] for stop in stops]), [stop[6] for stop in stops]
                return self._leaves_between(
                    positions, curves, (0, depth, [0.0] * len(stops)), (last, depth_at_end, swept)
                )
            depth = min(depth, depth_at_end)
        return SafetyEvent("workspace", None, depth, 0.0) if depth < 0.0 else None

    def _leaves_between(
        self, begin: Sequence[float], curves: Sequence[Curve], here: Point, there: Point
    ) -> SafetyEvent | None:
        """The same between two points of the stop from ``begin`` that are inside."""
        (first, depth_here, swept_here), (last, depth_there, swept_there) = here, there
        if last - first < 2:
            return None
        tick = first + max(1, (last - first) * 3 // 10)  # about half the way, as it slows down
        positions, swept, before, after = [], [], [], []
        for axis, q, curve, to_here, to_there in zip(self._axes, begin, curves, swept_here, swept_there, strict=True):
            gone, way = axis.along(curve, tick)
            positions.append(q + gone)
            swept.append(way)
            before.append(way - to_here)
            after.append(to_there - way)
        depth, levers = self._depth(positions)
        if depth < 0.0:
            return SafetyEvent("workspace", None, depth, 0.0)
        point, event = (tick, depth, swept), None
        if depth + depth_there < longest_way(levers, after):
            event = self._leaves_between(begin, curves, point, there)
        if event is None and depth + depth_here < longest_way(levers, before):
            event = self._leaves_between(begin, curves, here, point)
        return event

    def _depth(self, positions: Sequence[float]) -> tuple[float, Levers]:
        """Distance [m] of the tool point to the nearest face of the box, negative outside; and the joints' levers."""
        assert self._tool is not None
        assert self.limits.workspace is not None
        (x, y, z), levers = self._tool.place(positions)
        box = self.limits.workspace
        (x0, y0, z0), (x1, y1, z1) = box.low, box.high
        depth = x - x0
        for other in (x1 - x, y - y0, y1 - y, z - z0, z1 - z):
            if other < depth:
                depth = other
        return depth, levers

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


def _what_is_broken(joint: int, axis: Axis, target: float, speed: float, accel: float, old_accel: float) -> SafetyEvent:
    """Which limit keeps ``joint`` from being at ``target`` now."""
    if not -axis.max_speed <= speed <= axis.max_speed:
        return SafetyEvent("velocity", joint, speed, axis.max_speed)
    if not -axis.max_accel <= accel <= axis.max_accel:
        return SafetyEvent("acceleration", joint, accel, axis.max_accel)
    if not -axis.max_accel_step <= accel - old_accel <= axis.max_accel_step:
        return SafetyEvent("jerk", joint, (accel - old_accel) / axis.dt, axis.max_accel_step / axis.dt)
    return SafetyEvent("braking_distance", joint, target, axis.high if speed > 0.0 else axis.low)
