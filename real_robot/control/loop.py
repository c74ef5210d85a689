"""One arm's control loop without any wire: measurements and actions in, safe commands out, all on absolute ticks.

Two rates on one grid: every *command tick* (100 Hz or so) a position goes through the safety filter to the
controller; every *control tick* (the policy's own rate) the next action becomes the goal that the commands move to
in a straight line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from real_robot.control.embodiment import Embodiment
from real_robot.safety.filter import Command, Measurement, RobotLimits, SafeCommand, SafetyFilter


class ActionSource(Protocol):
    """Who decides: a policy on a server, a program that steps the robot, a person."""

    def action(self, tick: int, measured: Measurement) -> NDArray[np.float32] | None:
        """What to do in this control period, [A] in [-1, 1]; None: brake and hold. Returns at once."""
        ...

    def forget(self) -> None:
        """What was planned is void."""
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


class ControlLoop:
    """``tick`` once per command period, with the time of a clock that never jumps."""

    def __init__(self, limits: RobotLimits, *, control_hz: float, embodiment: Embodiment, source: ActionSource) -> None:
        ratio = limits.command_hz / control_hz
        if abs(ratio - round(ratio)) > 1e-6 or ratio < 1:
            raise ValueError(
                f"command_rate {limits.command_hz:g} Hz must be a multiple of the policy's {control_hz:g} Hz"
            )
        self.filter = SafetyFilter(limits)
        self.counters = LoopCounters()
        self.paused = False
        self.source = source
        self._embodiment = embodiment
        self._period = round(ratio)
        # this control period's straight line, joint positions from and to
        self._from: list[float] = []
        self._goal: list[float] | None = None

    def warm_up(self, joints: list[float]) -> None:
        """The first call of numerical code takes its time: before ``start``, not in a tick."""
        self._embodiment.begin(joints)
        self._embodiment.targets(np.zeros(self._embodiment.action_dim, dtype=np.float32), joints)

    def start(self, joints: list[float], now_s: float) -> None:
        """From rest where the arm is. ValueError as ``SafetyFilter.start``."""
        self.filter.start(joints, now_s)
        self._tick, self._control_tick = 0, -1
        self._forget_plan()

    def tick(self, measured: Measurement | None, now_s: float) -> SafeCommand:
        """The command for this tick."""
        control_tick, part = divmod(self._tick, self._period)
        if control_tick > self._control_tick and measured is not None:
            self._control_tick = control_tick
            self._control(control_tick, measured)
        command = None
        if self._goal is not None:
            share = (part + 1) / self._period
            positions = [a + share * (b - a) for a, b in zip(self._from, self._goal, strict=True)]
            command = Command(positions, now_s)
        out = self.filter.filter(command, measured, now_s)
        self._account(out)
        self._tick = out.tick
        return out

    def stop(self, reason: str) -> None:
        """Latched protective hold."""
        self.filter.stop(reason)
        self._forget_plan()

    def pause(self) -> None:
        """Brake and hold until ``resume``; what was planned is forgotten."""
        self.paused = True
        self._forget_plan()

    def resume(self) -> None:
        self.paused = False

    def _control(self, tick: int, measured: Measurement) -> None:
        """Choose the goal of this control period."""
        self.counters.control_ticks += 1
        idle = self.paused or self.filter.stopped
        action = None if idle else self.source.action(tick, measured)
        if action is None:
            self.counters.holds += 1
            self._goal = None
            return
        self.counters.actions += 1
        joints = list(measured.positions)
        if self._goal is None:
            self._embodiment.begin(joints)
        self._from = self._goal or list(self.filter.positions)
        self._goal = self._embodiment.targets(action, joints)

    def _account(self, out: SafeCommand) -> None:
        """After a rejection the plan goes on from where the arm brakes, not from where it would have been."""
        if not out.accepted:
            if self._goal is not None:
                self.counters.rejected += 1
                self.counters.last_rejection = str(out.events[-1])
                self._goal = None
        elif out.events:
            self.counters.clamped += 1
        self.counters.missed_ticks += sum(int(e.value) for e in out.events if e.reason == "missed_ticks")

    def _forget_plan(self) -> None:
        self.source.forget()
        self._goal = None
