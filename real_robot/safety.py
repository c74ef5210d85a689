"""The last thing before the wire: one pure, deterministic filter for policy and human alike.

Every control tick goes through ``SafetyFilter.filter``: a command that breaks a hard rule is rejected whole and the
arm brakes; one that is only too far or too fast is followed as closely as the limits allow. Either way the positions
that come out, taken tick by tick, never exceed a limit of position, velocity, acceleration or jerk, and a stop that
keeps them all is always at hand (see ``real_robot.stopping``). Nothing changes without an event that says why.

This is a *protective hold* in software. It is not an emergency stop, and it is not certified for anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from typing import Literal, NamedTuple

from real_robot.kinematics import JointFrame, ToolPoint, Vector
from real_robot.stopping import STILL, Axis, AxisLimits, Stop, stop_length

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
        if self._tool and self._depth(positions) < 0.0:
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
            state, stops = self._follow(command.positions, events)
            rejection = self._leaves_workspace(state, stops) if self._tool else None
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

    def _follow(self, wanted: Sequence[float], events: list[SafetyEvent]) -> tuple[State, list[Stop]]:
        """Each joint to its wanted position if the limits allow, else as close as they do; and its stop from there."""
        dt = self.dt
        positions, speeds, accels, stops = [], [], [], []
        joints = zip(self._axes, wanted, *self._state, self._catching_up, strict=True)
        for i, (axis, target, old_position, old_speed, old_accel, catching_up) in enumerate(joints):
            if not axis.low - _SLACK <= target <= axis.high + _SLACK:
                bound = axis.low if target < axis.low else axis.high
                events.append(SafetyEvent("position", i, target, bound))
                target = bound
            speed = (target - old_position) / dt
            accel = (speed - old_speed) / dt
            if (
                catching_up
                or not -axis.max_accel <= accel <= axis.max_accel
                or not -axis.max_accel_step <= accel - old_accel <= axis.max_accel_step
                or not axis.viable(target, stop := axis.stop(speed, accel), _SLACK)
            ):
                target, speed, accel, stop = self._catch_up(i, target, speed, accel, events)
            positions.append(target)
            speeds.append(speed)
            accels.append(accel)
            stops.append(stop)
        return (positions, speeds, accels), stops

    def _catch_up(
        self, i: int, target: float, speed: float, accel: float, events: list[SafetyEvent]
    ) -> tuple[float, float, float, Stop]:
        """Joint ``i`` towards a target it cannot, or should not yet, reach in this tick.

        Reaching it is put off until the next tick can also take on the target's own speed: jumping onto it any
        sooner would throw the joint past it.
        """
        axis, dt = self._axes[i], self.dt
        positions, speeds, accels = self._state
        q, v, a = positions[i], speeds[i], accels[i]
        target_speed = (target - min(max(self._targets[i], axis.low), axis.high)) / dt
        target_speed = min(max(target_speed, -axis.max_speed), axis.max_speed)
        reason, value, limit = _first_broken(axis, target, speed, accel, a)
        if reason is None:
            settling = (target_speed - speed) / dt
            room = min(axis.max_accel, axis.max_accel_step)
            if abs(settling) <= room and abs(settling - accel) <= axis.max_accel_step:
                self._catching_up[i] = False
                return target, speed, accel, axis.stop(speed, accel)
            reason, value, limit = "catching_up", target - q, 0.0
        self._catching_up[i] = True
        events.append(SafetyEvent(reason, i, value, limit))
        closer = axis.toward(target, target_speed, q, v, a)
        position = q + (v + closer * dt) * dt
        speed = (position - q) / dt
        accel = (speed - v) / dt
        if axis.viable(position, stop := axis.stop(speed, accel), 0.0):
            return position, speed, accel, stop
        position, speed, accel = _brake_joint(axis, q, v, a)
        return position, speed, accel, axis.stop(speed, accel)

    def _leaves_workspace(self, state: State, stops: Sequence[Stop]) -> SafetyEvent | None:
        """Whether the tool would be outside the box at this tick or at any tick of the stop that follows it.

        A joint that moves by x moves the tool by at most its lever times x. So a tool that is deeper inside the box
        than the whole stop can throw it stays there, and so does one on its way between two points that are, together,
        deeper than the way is long. The stop is followed, tick by tick, only where both leave a doubt.
        """
        assert self._tool is not None
        reach = self._tool.reach
        depth = self._depth(state[0])
        throw = 0.0
        for lever, (lowest, highest, _, _) in zip(reach, stops, strict=True):
            throw += lever * (highest - lowest)
        if 0.0 <= depth < throw:
            depth_at_end = self._depth([q + end for q, (_, _, end, _) in zip(state[0], stops, strict=True)])
            if depth_at_end < 0.0:
                depth = depth_at_end
            way = sum([lever * stop_length(stop) for lever, stop in zip(reach, stops, strict=True)])
            thrown = 0.0  # since the tool was last located
            while depth >= 0.0 and depth + depth_at_end < way and (any(state[1]) or any(state[2])):
                state = self._braked(state)
                thrown += self.dt * sum([lever * abs(speed) for lever, speed in zip(reach, state[1], strict=True)])
                if thrown > 0.5 * depth:
                    depth, way, thrown = self._depth(state[0]), way - thrown, 0.0
        return SafetyEvent("workspace", None, depth, 0.0) if depth < 0.0 else None

    def _depth(self, positions: Sequence[float]) -> float:
        """Distance [m] of the tool point to the nearest face of the box; negative outside."""
        assert self._tool is not None
        assert self.limits.workspace is not None
        (x, y, z), box = self._tool(positions), self.limits.workspace
        (x0, y0, z0), (x1, y1, z1) = box.low, box.high
        return min(x - x0, x1 - x, y - y0, y1 - y, z - z0, z1 - z)

    def _braked(self, state: State) -> State:
        """The next state of the stop law, every joint."""
        positions, speeds, accels = [], [], []
        for axis, q, v, a in zip(self._axes, *state, strict=True):
            position, speed, accel = _brake_joint(axis, q, v, a)
            positions.append(position)
            speeds.append(speed)
            accels.append(accel)
        return positions, speeds, accels

    def _commit(self, state: State, targets: Sequence[float], *, accepted: bool) -> None:
        self._state = state
        self._targets = list(targets)
        if not accepted:
            self._catching_up = [False] * len(self._axes)


def _brake_joint(axis: Axis, q: float, v: float, a: float) -> tuple[float, float, float]:
    """Position, speed and acceleration after one tick of the stop law; exactly still at its end."""
    dt = axis.dt
    step = (v + axis.accelerate(-v, a) * dt) * dt
    position = q + step if abs(step) > STILL else q
    speed = (position - q) / dt
    return position, speed, (speed - v) / dt


def _first_broken(
    axis: Axis, target: float, speed: float, accel: float, old_accel: float
) -> tuple[Rejection | Clamp | Timing | None, float, float]:
    """Which limit keeps the joint from being at ``target`` now: reason, value and limit; None if none does."""
    if not -axis.max_speed <= speed <= axis.max_speed:
        return "velocity", speed, axis.max_speed
    if not -axis.max_accel <= accel <= axis.max_accel:
        return "acceleration", accel, axis.max_accel
    if not -axis.max_accel_step <= accel - old_accel <= axis.max_accel_step:
        return "jerk", (accel - old_accel) / axis.dt, axis.max_accel_step / axis.dt
    if not axis.viable(target, axis.stop(speed, accel), _SLACK):
        return "braking_distance", target, axis.high if speed > 0.0 else axis.low
    return None, 0.0, 0.0
