"""One pure, deterministic filter between every source of commands (policy or human) and the controller.

    ... | executed | sent: executed next | new point | stop from there, sent with it
                   now                   now + lead

At every command tick ``SafetyFilter.filter`` decides one more point of the motion, ``lead`` ticks ahead of now, and
``path`` is what is sent: the points that are still to come with their absolute times, and the stop after them. A
message that arrives late or is lost changes nothing as long as a later one arrives before the ``lead`` is used up.
After a pause of a third of it nothing is sent until the arm has come to rest by the stop that it has. Without a lead
two missed ticks in a row are a pause, as the next position would be a jump: the arm is held where it was sent last.

A command that breaks a hard rule is rejected as a whole and the arm brakes; one that is only too far or too fast is
followed as closely as the limits allow. After one that leads too close to something the next ones are followed in
shorter steps, so that an arm beside it can leave. Position, velocity, acceleration and jerk stay within the limits at
the points and between them, and a stop that keeps all limits is always possible (``real_robot.safety.stopping``).

A latched stop replaces what was sent ``_PROMPT_S`` from now on. This is a *protective hold* in software. It is not an
emergency stop and not certified.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, inf, isfinite, nan
from typing import Any

from real_robot.safety.collisions import CollisionClearance
from real_robot.safety.commands import Command, Measurement, PathPoint, SafeCommand, SafetyEvent
from real_robot.safety.contact import PointSpeeds
from real_robot.safety.limits import RobotLimits
from real_robot.safety.sent import SentPath
from real_robot.safety.stopping import AT_REST, Axis, braked, duration
from real_robot.safety.swept import Motions, SweptCheck, resting
from real_robot.safety.workspace import WorkspaceClearance

# A command may pass this close to its limits: rad or m.
_SLACK = 1e-9
# A stop changes the motion from this long after now on: until its message has certainly arrived.
_PROMPT_S = 0.04
# Points before now that are sent, so that the controller has one before the time at which the message arrives.
_SENT_BEFORE_S = 0.03
# Farthest that a controller's position is taken to be from the measured one before anything was sent to it.
UNKNOWN_OFFSET = {"rad": 0.02, "m": 0.005}
# In a new episode a joint may be so much farther from where it was sent than before, as a share of its hold tolerance.
_AS_BEFORE = 0.05
# Of the highest speed for contact that motion which was too fast is scaled down to.
_CONTACT_SHARE = 0.95
# After a motion was refused for what is near, the share of the way to the target that is aimed at is multiplied by the
# first, after each one that was not by the second. A short motion, in the same direction, needs less room.
_NEARER, _FARTHER, _NEAREST = 0.5, 1.5, 1e-4
# A joint at rest for longer must be within its ``hold_tolerance``.
_SETTLED_S = 0.5


class SafetyFilter:
    """One robot's filter. Call it every tick, with or without a command; it keeps the motion.

    ``lead_s`` is rounded to whole ticks; positions are in the units of their axes, rad or m.

    Ticks are on the grid start + k / command_hz. A late call has missed ticks: what was sent before ended in a stop, so
    the points of the missed ticks brake. ``speed_scale`` in (0, 1] lowers the speed of every joint.
    ``lost``: after a pause; what was sent is no longer known, so nothing may be sent before the next ``start``.
    """

    def __init__(self, limits: RobotLimits, *, lead_s: float = 0.0) -> None:
        self.limits = limits
        self.dt = 1.0 / limits.command_hz
        self.speed_scale = 1.0
        self.lead = round(lead_s / self.dt)
        self._prompt = min(self.lead, ceil(_PROMPT_S / self.dt))
        self._sent_before, self._settled = ceil(_SENT_BEFORE_S / self.dt), ceil(_SETTLED_S / self.dt)
        self._axes = [Axis(axis, self.dt) for axis in limits.axes]
        self._steps = [axis.step_from_measured for axis in limits.axes]
        self._held = [min(axis.hold_tolerance, axis.step_from_measured) for axis in limits.axes]
        self._residuals = [(i, r) for i, r in enumerate(axis.contact_residual for axis in limits.axes) if r is not None]
        self._checks: list[SweptCheck[Any, Any]] = []
        for box in (limits.workspace, *limits.more_arms):
            if box is not None:
                self._checks.append(SweptCheck(WorkspaceClearance(box, limits.axes)))
        if limits.collisions:
            self._checks.append(SweptCheck(CollisionClearance(limits.collisions, limits.axes)))
        arms = [] if limits.workspace is None else [limits.workspace, *limits.more_arms]
        self._point_speeds = PointSpeeds(limits.collisions, arms, limits.axes) if limits.contact else None
        self._max_point_speed = limits.contact.max_speed_m_s * self.dt if limits.contact else inf
        self._aim = 1.0
        self._stop_reason: str | None = None
        self._started = self.lost = False
        self._measured: Sequence[float] | None = None  # the last positions that are numbers
        kept = ceil(limits.max_measurement_age_s / self.dt) + self._sent_before + 4
        self._sent = SentPath(limits.command_hz, self.lead + kept)

    def start(self, positions: Sequence[float], now_s: float, *, moved: bool = False) -> None:
        """Hold at the measured ``positions``, or, joint by joint, where the arm was sent if it still holds there, which
        a base never does.

        ``moved``: the arm may have been moved since. A joint is then held where it was sent only if it is measured as
        near to there as before: a gripper goes on pressing on what it holds, but is not driven back.

        The first point of the motion is so late that the controller comes to it within the limits, whether it holds
        the measured position or the one where it was sent last. ValueError if the arm is not inside the limits.
        """
        if self._started and not self.at_rest:
            raise ValueError("the arm has not come to rest: call filter(None, ...) until at_rest, then start")
        self._check_start(positions)
        sent = self.positions if self._started else positions
        offsets = [abs(q - p) for q, p in zip(positions, sent, strict=True)]
        unknown = [UNKNOWN_OFFSET[axis.unit] for axis in self.limits.axes]
        tolerances = [0.0 if axis.drives else held for axis, held in zip(self.limits.axes, self._held, strict=True)]
        if moved and self._started:
            before = [abs(q - p) for q, p in zip(self._measured or sent, sent, strict=True)]
            more = [min(d, _AS_BEFORE * held) for d, held in zip(unknown, self._held, strict=True)]
            tolerances = [min(held, b + m) for held, b, m in zip(tolerances, before, more, strict=True)]
        held = [
            p if offset <= tolerance else float(q)
            for q, p, offset, tolerance in zip(positions, sent, offsets, tolerances, strict=True)
        ]
        if self._start_problem(held):  # a mix that nobody checked, unlike the measured positions
            held = [float(q) for q in positions]
        ticks = max([axis.take_up_ticks(max(d, o)) for axis, d, o in zip(self._axes, unknown, offsets, strict=True)])
        if self._point_speeds is not None:  # a quintic's highest speed is 1.875 times its mean
            path = [max(d, o) for d, o in zip(unknown, offsets, strict=True)]
            way = self._point_speeds.bound(positions, path, path)
            ticks = max(ticks, ceil(1.875 * way / self._max_point_speed))
        ticks += self.lead  # the message may be as late
        self._started = True
        self._braking = self.lost = False
        self._aim = 1.0
        self._sent.restart(now_s)
        for tick in range(ticks, max(ticks + 1, self.lead) + 1):
            self._sent.append(tick, resting(held), moved=ticks - 1)
        self._targets = held
        self._last = self._command(accepted=True, events=[])

    @property
    def tick(self) -> int:
        """Of the last point that was decided."""
        return self._sent.last.tick

    @property
    def last_point_s(self) -> float:
        """When the last point that was decided is due."""
        return self._sent.last.sent.time_s

    @property
    def taken_up(self) -> bool:
        """Whether the controller has come to where the arm is held, so that the next call decides a point."""
        return self._sent.last.tick <= self._sent.now + self.lead

    @property
    def braking(self) -> bool:
        """Whether the arm, not a command, is why it brakes: a stop, or measurements that are missing."""
        return self._braking

    @property
    def at_rest(self) -> bool:
        """Whether the arm was sent to rest, at this tick and from now on."""
        return self._sent.now > self._sent.last.moved

    @property
    def positions(self) -> tuple[float, ...]:
        """Where every joint is sent, ``lead`` ticks from now."""
        return tuple(self._sent.last.motions.positions)

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

    def end(self) -> None:
        """Nobody calls ``filter`` any more, and the stop that was sent last has been executed: the arm is at rest."""
        while self._started and self._sent.last.moved == self._sent.last.tick:
            self._brake()
        if self._started:
            self._sent.now = max(self._sent.now, self._sent.last.tick)

    def filter(self, command: Command | None, measured: Measurement | None, now_s: float) -> SafeCommand:
        """The command for the tick at ``now_s``. Never raises on bad input; RuntimeError before ``start``.

        A call within half a period of the previous tick changes nothing and returns that tick's command again.
        """
        if not self._started:
            raise RuntimeError("the arm's position is not known: call start(positions, now_s) first")
        events: list[SafetyEvent] = []
        if not self._advance_clock(now_s, events):
            return self._last._replace(events=tuple(events), urgent=False)
        problem = self._arm_problem(measured, now_s)
        if measured and len(measured.positions) == len(self._axes) and all(map(isfinite, measured.positions)):
            self._measured = tuple(measured.positions)
        urgent = problem is not None and not self._braking and not self.lost
        if urgent:
            self._sent.drop_from(self._sent.now + self._prompt)
        self._braking = problem is not None
        frontier, accepted = self._sent.now + self.lead, True
        while self._sent.last.tick < frontier - 1:  # missed ticks, and what was dropped
            self._brake()
        if self._sent.last.tick < frontier:
            accepted = self._decide(command, problem, now_s, events)
        elif problem:
            events.append(problem)
            accepted = False
        self._last = self._command(accepted=accepted, events=events)
        return self._last._replace(urgent=urgent)

    def path(self) -> list[PathPoint]:
        """What is sent at this tick: the points from shortly before now on, and the stop that follows the last one."""
        return self._sent.from_tick(self._sent.now - self._sent_before)

    def sent_position(self, time_s: float) -> list[float]:
        """Where every joint was sent for this time."""
        return self._sent.positions(time_s)

    # -- the motion ------------------------------------------------------------------------------------------------

    def _decide(
        self, command: Command | None, problem: SafetyEvent | None, now_s: float, events: list[SafetyEvent]
    ) -> bool:
        """One more point of the motion; whether it follows the command."""
        rejection = problem or self._command_problem(command, now_s)
        if rejection is None:
            assert command is not None
            wanted, last = command.positions, self._targets
            if self._aim < 1.0:
                now = self._sent.last.motions.positions
                wanted = last = [q + self._aim * (target - q) for q, target in zip(now, wanted, strict=True)]
            motions = self._follow(wanted, last, events, [self.speed_scale] * len(self._axes))
            if self._point_speeds is not None:
                motions, rejection = self._limit_contact_speed(wanted, last, motions, events)
            rejection = rejection or self._near_problem(motions, events)
        if rejection is not None:
            events.append(rejection)
            self._brake()
            return False
        assert command is not None
        self._sent.append(self._sent.last.tick + 1, motions)
        self._targets = list(command.positions)
        return True

    def _limit_contact_speed(
        self, wanted: Sequence[float], last: Sequence[float], motions: Motions, events: list[SafetyEvent]
    ) -> tuple[Motions, SafetyEvent | None]:
        """The motion with all joint speeds scaled down so that no point of the arm is too fast, in the stop too; why it
        may not be made if that is not enough."""
        assert self._point_speeds is not None
        before = self._sent.last.motions
        limit, fastest = self._max_point_speed, self._point_speeds.fastest(before, motions)
        if fastest <= limit:
            return motions, None
        share = _CONTACT_SHARE * limit / fastest
        scales = [
            min(self.speed_scale, share * abs(u) / axis.max_speed)
            for u, axis in zip(motions.speeds, self._axes, strict=True)
        ]
        motions = self._follow(wanted, last, [], scales)
        event = SafetyEvent("contact_speed", None, fastest / self.dt, limit / self.dt)
        if self._point_speeds.fastest(before, motions) > limit:
            return motions, event
        events.append(event)
        return motions, None

    def _near_problem(self, motions: Motions, events: list[SafetyEvent]) -> SafetyEvent | None:
        """Why the motion may not be made for what is near; the next ones are then shorter."""
        before = self._sent.last.motions.positions
        for check in self._checks:
            if problem := check.violation(before, motions):
                self._aim = max(_NEAREST, _NEARER * self._aim)
                return problem
        if self._aim < 1.0:
            events.append(SafetyEvent("near", None, 1.0, self._aim))
            self._aim = min(1.0, _FARTHER * self._aim)
        return None

    def _follow(
        self, wanted: Sequence[float], last_wanted: Sequence[float], events: list[SafetyEvent], scales: Sequence[float]
    ) -> Motions:
        """Each joint towards its wanted position, ``last_wanted`` a tick ago, as closely as the limits allow, at
        most at its share ``scales`` of the highest speed; one that cannot, brakes."""
        positions, speeds, accels, stops = [], [], [], []
        joints = zip(self._axes, wanted, last_wanted, scales, *self._sent.last.motions, strict=True)
        for i, (axis, target, last, scale, q, u, w, stop) in enumerate(joints):
            if not axis.low - _SLACK <= target <= axis.high + _SLACK:
                events.append(SafetyEvent("position", i, target, axis.low if target < axis.low else axis.high))
                target = axis.low if target < axis.low else axis.high
            if not axis.low <= last <= axis.high:
                last = axis.low if last < axis.low else axis.high
            target_speed = target - last
            if not -axis.max_speed <= target_speed <= axis.max_speed:
                events.append(SafetyEvent("velocity", i, target_speed / self.dt, axis.max_speed / self.dt))
                target_speed = axis.max_speed if target_speed > 0.0 else -axis.max_speed
            accel = axis.toward(target, target_speed, (q, u, w), scale)
            jerk = accel - w
            position, speed = q + u + 0.5 * w + jerk / 6.0, u + w + 0.5 * jerk
            after = axis.viable_stop(position, speed, accel, _SLACK)
            if after is None or (w * accel < 0.0 and not -axis.max_speed <= u - 0.5 * w * w / jerk <= axis.max_speed):
                events.append(SafetyEvent("braking_distance", i, target, axis.high if target > q else axis.low))
                position, speed, accel, after = braked(q, u, w, stop)
            elif not -axis.far <= target - position <= axis.far:
                events.append(SafetyEvent("acceleration", i, target - position, axis.far))
            positions.append(position)
            speeds.append(speed)
            accels.append(accel)
            stops.append(after)
        return Motions(positions, speeds, accels, stops)

    def _brake(self) -> None:
        """One more tick of the stop that follows the last point."""
        point = self._sent.last
        if point.motions.stops == [AT_REST] * len(self._axes):
            self._sent.append(point.tick + 1, point.motions)
        else:
            joints = [braked(*joint) for joint in zip(*point.motions, strict=True)]
            self._sent.append(point.tick + 1, Motions(*(list(values) for values in zip(*joints, strict=True))))
        self._targets = list(self._sent.last.motions.positions)

    def _command(self, *, accepted: bool, events: list[SafetyEvent]) -> SafeCommand:
        point = self._sent.last
        _, positions, speeds, accels = point.sent
        return SafeCommand(point.tick, tuple(positions), tuple(speeds), tuple(accels), accepted, tuple(events))

    # -- rules -----------------------------------------------------------------------------------------------------

    def _check_start(self, positions: Sequence[float]) -> None:
        axes = self.limits.axes
        if len(positions) != len(axes):
            raise ValueError(f"{len(positions)} joint positions were measured, the limits name {len(axes)} joints")
        for axis, q in zip(axes, positions, strict=True):
            low, high = axis.position
            if not low <= q <= high:
                raise ValueError(
                    f"joint {axis.name!r} is at {q:.4f} {axis.unit}, allowed is {low} to {high}; move it inside by hand"
                )
        if problem := self._start_problem(positions):
            raise ValueError(problem)

    def _start_problem(self, positions: Sequence[float]) -> str:
        """What is too near to an arm that begins there, or ""."""
        return next((problem for check in self._checks if (problem := check.clearance.start_problem(positions))), "")

    def _advance_clock(self, now_s: float, events: list[SafetyEvent]) -> bool:
        """Move to the tick nearest to ``now_s``; False if that is not a new one."""
        passed = (now_s - self._sent.time_s) * self.limits.command_hz
        if 0.5 <= passed < 1.5:
            self._sent.time_s += self.dt
            self._sent.now += 1
            return True
        if passed >= 1.5 and isfinite(passed):
            missed = round(passed) - 1
            events.append(SafetyEvent("missed_ticks", None, missed, 0.0))
            self._sent.time_s += (missed + 1) * self.dt
            self._sent.now += missed + 1
            if not self.lost and 3 * missed >= (self.lead or 4):  # two ticks without a lead
                self._lose()
            return True
        if -0.5 < passed < 0.5:
            events.append(SafetyEvent("early_tick", None, now_s, self._sent.time_s))
            return False
        events.append(SafetyEvent("clock_jump", None, now_s, self._sent.time_s))
        self.stop("the clock is not finite or ran backwards")
        if isfinite(now_s):
            self._sent.time_s = now_s
        self._sent.now += 1
        return True

    def _lose(self) -> None:
        """After a pause. Without a lead the arm is held where it was sent last, and has the time of a stop for it."""
        self.lost = True
        if not self.lead:
            last = self._sent.last
            ticks = max([duration(stop[0]) for stop in last.motions.stops])
            rests = self._sent.now + ticks if ticks else last.moved
            self._sent.append(last.tick + 1, resting(last.motions.positions), moved=rests)

    def _arm_problem(self, measured: Measurement | None, now_s: float) -> SafetyEvent | None:
        """Why the arm must brake now, whatever the command; comparisons are written so that NaN is a problem."""
        if self._stop_reason is not None:
            return SafetyEvent("stopped", None, 0.0, 0.0)
        if self.lost:
            return SafetyEvent("missed_ticks", None, 0.0, 0.0)
        limit = self.limits.max_measurement_age_s
        age = now_s - measured.stamp_s if measured else inf
        if measured is None or not abs(age) <= limit:
            return SafetyEvent("measurement_stale", None, age, limit)
        if len(measured.positions) != len(self._axes):
            return SafetyEvent("joint_count", None, len(measured.positions), len(self._axes))
        tolerances = self._held if self._sent.now > self._sent.last.moved + self._settled else self._steps
        sent = self.sent_position(measured.stamp_s)
        for i, (tolerance, q, p) in enumerate(zip(tolerances, measured.positions, sent, strict=True)):
            if not -tolerance <= q - p <= tolerance:
                if not isfinite(q):
                    return SafetyEvent("not_finite", i, q, tolerance)
                name, unit = self.limits.axes[i].name, self.limits.axes[i].unit
                self.stop(f"joint {name} is {abs(q - p):.3f} {unit} away from where it was sent")
                return SafetyEvent("step_from_measured", i, q - p, tolerance)
        return self._contact(measured.residuals)

    def _contact(self, residuals: Sequence[float] | None) -> SafetyEvent | None:
        """A residual above its limit, or a residual that has a limit and was not measured. Latches the stop."""
        for i, limit in self._residuals:
            residual = residuals[i] if residuals is not None and i < len(residuals) else nan
            if not -limit <= residual <= limit:
                self.stop(f"contact at joint {self.limits.axes[i].name}")
                return SafetyEvent("contact", i, residual, limit)
        return None

    def _command_problem(self, command: Command | None, now_s: float) -> SafetyEvent | None:
        """Why this command is not followed."""
        if command is None:
            return SafetyEvent("no_command", None, 0.0, 0.0)
        limit = self.limits.max_command_age_s
        age = now_s - command.stamp_s
        if not abs(age) <= limit:
            return SafetyEvent("command_stale", None, age, limit)
        if len(command.positions) != len(self._axes):
            return SafetyEvent("joint_count", None, len(command.positions), len(self._axes))
        for i, q in enumerate(command.positions):
            if not isfinite(q):
                return SafetyEvent("not_finite", i, q, 0.0)
        return None
