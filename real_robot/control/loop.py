"""One arm's control loop, independent of ROS: measurements and actions in, safe commands out, on absolute ticks.

Two rates on one grid: every *command tick* (about 100 Hz) a position goes through the safety filter to the controller;
every *control tick* (the policy's rate) the next action becomes the goal, which the commands approach in a straight
line in joint space. Points of the motion are decided ``lead`` ahead of their time.

Who may move the arm:

    stopped --release--> paused --resume--> running --pause--> paused      stop, a person's or the filter's: from each

Only while ``running`` actions are taken, and only an episode, from ``start`` to ``rest``, is resumed. Otherwise the arm
brakes, and once it is at rest nothing is sent at all (``live`` is False), so that another controller or a person may
move it; the next motion begins where it then is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, isfinite
from typing import Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from real_robot.control.embodiment import Embodiment
from real_robot.safety.commands import Command, Measurement, SafeCommand
from real_robot.safety.filter import SafetyFilter
from real_robot.safety.limits import RobotLimits

Mode = Literal["stopped", "paused", "running"]
# After a stop, and after ``begin_slowly``, the highest speed rises from this share to the whole within this time.
_RAMP_FROM, _RAMP_S = 0.1, 3.0
LIMIT_TOLERANCE = 1e-3  # [rad or m] of a joint at its limit, which is measured on either side of it


class Action(NamedTuple):
    """``values`` [A] in [-1, 1]; ``observed_s``: when what they are based on was observed [loop's clock]."""

    values: Float[np.ndarray, " A"]
    observed_s: float


@runtime_checkable
class ActionSource(Protocol):
    """What chooses actions: a policy on a server, a program that steps the robot, a person."""

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        """For control tick ``tick``, ``lead_ticks`` from now; None: brake and hold. Returns at once."""
        ...

    def executed(self, tick: int, action: Float[np.ndarray, " A"]) -> None:
        """The action of ``tick`` as the arm was sent, after all limits."""
        ...

    def clear(self) -> None:
        """Drop what was planned."""
        ...


@dataclass
class LoopCounters:
    """Since the start. ``holds``: control ticks without an action; ``rejected``, ``clamped``: command ticks."""

    control_ticks: int = 0
    actions: int = 0
    holds: int = 0
    rejected: int = 0
    clamped: int = 0
    missed_ticks: int = 0
    last_rejection: str = ""


class _Goal(NamedTuple):
    """Of one control tick: joint positions at its start and end, and the action."""

    tick: int
    start: Sequence[float]
    end: Sequence[float]
    action: Action


def lead_in_steps(lead_s: float, *, command_hz: float, control_hz: float) -> float:
    """How many control steps ahead the filter decides a point. The loop counts the nearest whole number of them."""
    return round(lead_s * command_hz) * control_hz / command_hz


def ticks_per_step(*, command_hz: float, control_hz: float) -> int:
    """ValueError if ``command_hz`` is not a multiple of ``control_hz``."""
    ratio = command_hz / control_hz
    if abs(ratio - round(ratio)) > 1e-6 or ratio < 1:
        raise ValueError(f"command_rate {command_hz:g} Hz must be a multiple of the policy's {control_hz:g} Hz")
    return round(ratio)


class ControlLoop:
    """Call ``tick`` at every multiple of the command period, with the time of a monotonic clock [s]. It begins paused.

    ``lead_s``: how long before its time a point is decided; 0 for controllers that do not take times. ``speed`` in
    (0, 1]: share of the highest speed that is used. ValueError if ``command_hz`` is not a multiple of ``control_hz``.
    """

    def __init__(
        self,
        limits: RobotLimits,
        *,
        control_hz: float,
        embodiment: Embodiment,
        source: ActionSource,
        lead_s: float = 0.0,
    ) -> None:
        self._period = ticks_per_step(command_hz=limits.command_hz, control_hz=control_hz)
        self.filter = SafetyFilter(limits, lead_s=lead_s)
        self.counters = LoopCounters()
        self.source = source
        self.live, self.speed = False, 1.0
        self._paused, self._in_episode = True, False
        self._embodiment = embodiment
        self._lead_steps = round(lead_in_steps(lead_s, command_hz=limits.command_hz, control_hz=control_hz))
        self._ramp_from_s: float | None = None  # of the resume after a stop
        self._ramp_is_due = False
        self._goal: _Goal | None = None
        self._executing: _Goal | None = None

    @property
    def mode(self) -> Mode:
        if self.filter.stopped:
            return "stopped"
        return "paused" if self._paused else "running"

    def warm_up(self, joints: Sequence[float]) -> None:
        """Run the embodiment once before ``start``: the first call of numerical code is slow."""
        self._embodiment.begin(joints)
        self._embodiment.targets(np.zeros(self._embodiment.action_dim, dtype=np.float32), joints)

    def start(self, joints: Sequence[float], now_s: float) -> None:
        """Begin an episode: hold at ``joints``, to which others may have moved the arm, and take actions.

        ValueError while stopped, and as ``SafetyFilter.start``.
        """
        self._start(joints, now_s, moved=True)

    def _start(self, joints: Sequence[float], now_s: float, *, moved: bool) -> None:
        if self.filter.stopped:
            raise ValueError(f"stopped: {self.filter.stopped}; release the stop first")
        hz = self.filter.limits.command_hz
        self.filter.start(self._within_limits(joints), floor(now_s * hz + 1e-6) / hz, moved=moved)
        self._tick, self._control_tick = self.filter.tick, -1
        self.live, self._paused, self._in_episode = True, False, True
        if self._ramp_is_due or self._ramp_from_s is not None:  # one that was interrupted begins again
            self._ramp_from_s, self._ramp_is_due = self.filter.last_point_s, False
        self._goal = self._executing = None
        self._clear_plan()

    def _within_limits(self, positions: Sequence[float]) -> list[float]:
        """Joints that are measured up to ``LIMIT_TOLERANCE`` beyond a limit are set to the limit."""
        inside = []
        for axis, q in zip(self.filter.limits.axes, positions, strict=True):
            clipped = min(max(q, axis.position[0]), axis.position[1])
            inside.append(clipped if abs(q - clipped) <= LIMIT_TOLERANCE else q)
        return inside

    def resume(self, measured: Measurement, now_s: float) -> None:
        """Take actions again, slowly at first if there was a stop.

        ValueError while stopped, outside an episode, and if the arm is no longer where it came to rest.
        """
        if not self._in_episode:
            raise ValueError("no episode is under way; begin one")
        if self.live and not self.filter.stopped and not self._ramp_is_due:
            self._paused = False
            return
        if self.live and not self.filter.at_rest:
            raise ValueError("the arm is still braking")
        self._check_pose(measured, [axis.step_from_measured for axis in self.filter.limits.axes])
        self._start(measured.positions, now_s, moved=False)

    def tick(self, measured: Measurement | None, now_s: float) -> SafeCommand | None:
        """The command for this tick, the last one at rest; None: nothing is to be sent."""
        if not self.live and not self._continue(measured, now_s):
            return None
        control_tick, part = divmod(self._tick, self._period)
        if control_tick > self._control_tick and measured is not None and self.filter.taken_up:
            self._control_tick = control_tick
            self._control(control_tick, measured)
        command = None
        if self._goal is not None:
            share = (part + 1) / self._period
            positions = [a + share * (b - a) for a, b in zip(self._goal.start, self._goal.end, strict=True)]
            command = Command(positions, self._goal.action.observed_s)
        self.filter.speed_scale = self._speed_scale(now_s)
        out = self.filter.filter(command, measured, now_s)
        self._account(out)
        self._tick = out.tick
        if self.filter.at_rest and (self.mode != "running" or self.filter.braking):
            self._report_executed()
            self.live = False
        return None if self.filter.lost else out

    def begin_slowly(self) -> None:
        """The speed rises from a tenth, as after a stop, from the point on that is decided next."""
        if self.live:
            self._ramp_from_s = self.filter.last_point_s

    def stop(self, reason: str) -> None:
        """Latched protective hold."""
        self.filter.stop(reason)
        self._paused = self._ramp_is_due = True
        self._clear_plan()

    def release(self) -> None:
        """Unlatch the stop; the arm stays paused. ValueError while it is still braking."""
        if self.live and not self.filter.at_rest:
            raise ValueError("the arm is still braking; release the stop when it is at rest")
        self.filter.release()

    def pause(self) -> None:
        """Brake and hold until ``resume``; the plan is dropped."""
        self._paused = True
        self._clear_plan()

    def rest(self) -> None:
        """Brake and hold until ``start``; the plan is dropped."""
        self.pause()
        self._in_episode = False

    def _continue(self, measured: Measurement | None, now_s: float) -> bool:
        """Go on by itself after the measurements were missing, if the arm is where it came to rest.

        After a pause it may be as far from there as a moving arm may be from where it was sent, as a controller of
        velocities went on meanwhile.
        """
        if self.mode != "running" or measured is None:
            return False
        if not abs(now_s - measured.stamp_s) <= self.filter.limits.max_measurement_age_s:
            return False
        if not all(map(isfinite, measured.positions)):
            return False
        try:
            axes, lost = self.filter.limits.axes, self.filter.lost
            self._check_pose(measured, [axis.step_from_measured if lost else axis.hold_tolerance for axis in axes])
            self._start(measured.positions, now_s, moved=False)
        except ValueError as error:
            self.stop(str(error))
            return False
        return True

    def _check_pose(self, measured: Measurement, tolerances: Sequence[float]) -> None:
        sent = self.filter.positions
        axes = self.filter.limits.axes
        for axis, q, p, tolerance in zip(axes, measured.positions, sent, tolerances, strict=True):
            if not abs(q - p) <= tolerance:
                raise ValueError(
                    f"joint {axis.name} is {abs(q - p):.3f} {axis.unit} away from where the arm came to rest; end this "
                    "episode and begin one from here"
                )

    def _speed_scale(self, now_s: float) -> float:
        if self._ramp_from_s is None:
            return self.speed
        share = _RAMP_FROM + (1.0 - _RAMP_FROM) * max(0.0, now_s - self._ramp_from_s) / _RAMP_S
        if share >= 1.0:
            self._ramp_from_s = None
        return self.speed * min(1.0, share)

    def _control(self, tick: int, measured: Measurement) -> None:
        """Choose the goal of this control period."""
        self.counters.control_ticks += 1
        self._report_executed()
        asks = self.mode == "running" and all(map(isfinite, measured.positions))
        action = self.source.action(tick, measured, self._lead_steps) if asks else None
        if action is None:
            self.counters.holds += 1
            self._goal = None
            return
        self.counters.actions += 1
        sent = self.filter.sent_position(measured.stamp_s)
        start = self._goal.end if self._goal else self.filter.positions
        # where the arm will be when the action begins, if it then lags as it does now
        joints = [p + q - at for p, q, at in zip(self.filter.positions, measured.positions, sent, strict=True)]
        if self._goal is None:  # not where it lags, or it would be lowered, and let go of what it holds
            self._embodiment.begin(self.filter.positions)
        self._goal = _Goal(tick, start, self._embodiment.targets(action.values, joints), action)
        self._executing = self._goal._replace(start=self.filter.positions)

    def _report_executed(self) -> None:
        """Tell the source what came of its last action."""
        if self._executing is not None:
            tick, start, _, action = self._executing
            achieved = self._embodiment.achieved(action.values, start, self.filter.positions)
            self.source.executed(tick, np.clip(achieved, -1.0, 1.0).astype(np.float32))
            self._executing = None

    def _account(self, out: SafeCommand) -> None:
        """Count events. After a rejection the goal is dropped, so that motion continues from where the arm brakes."""
        if any(event.reason == "early_tick" for event in out.events):  # the last command again
            return
        if not out.accepted:
            if self._goal is not None:
                self.counters.rejected += 1
                self.counters.last_rejection = str(out.events[-1])
                self._goal = None
            if self.filter.stopped and not self._ramp_is_due:
                self.stop(self.filter.stopped)
        elif out.events:
            self.counters.clamped += 1
        self.counters.missed_ticks += sum(int(e.value) for e in out.events if e.reason == "missed_ticks")

    def _clear_plan(self) -> None:
        self.source.clear()
        self._goal = None
