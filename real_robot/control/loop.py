"""One arm's control loop, independent of ROS: measurements and actions in, safe commands out, on absolute ticks.

Two rates on one grid: every *command tick* (about 100 Hz) a position goes through the safety filter to the controller;
every *control tick* (the policy's rate) the next action becomes the goal, which the commands approach in a straight
line in joint space.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float

from real_robot.control.embodiment import Embodiment
from real_robot.safety.commands import Command, Measurement, SafeCommand
from real_robot.safety.filter import SafetyFilter
from real_robot.safety.limits import RobotLimits


@runtime_checkable
class ActionSource(Protocol):
    """What chooses actions: a policy on a server, a program that steps the robot, a person."""

    def action(self, tick: int, measured: Measurement) -> Float[np.ndarray, " A"] | None:
        """The action of this control period, in [-1, 1]; None: brake and hold. Returns at once."""
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


class ControlLoop:
    """Call ``tick`` once per command period, with the time of a monotonic clock [s].

    ValueError if ``command_hz`` is not a multiple of ``control_hz``.
    """

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
        # joint positions at the start and at the end of this control period
        self._from: list[float] = []
        self._goal: list[float] | None = None

    def warm_up(self, joints: list[float]) -> None:
        """Run the embodiment once before ``start``: the first call of numerical code is slow."""
        self._embodiment.begin(joints)
        self._embodiment.targets(np.zeros(self._embodiment.action_dim, dtype=np.float32), joints)

    def start(self, joints: list[float], now_s: float) -> None:
        """Start from rest at ``joints``. ValueError as ``SafetyFilter.start``."""
        self.filter.start(joints, now_s)
        self._tick, self._control_tick = 0, -1
        self._clear_plan()

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
        self._clear_plan()

    def pause(self) -> None:
        """Brake and hold until ``resume``; the plan is dropped."""
        self.paused = True
        self._clear_plan()

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
        """Count events. After a rejection the goal is dropped, so that motion continues from where the arm brakes."""
        if not out.accepted:
            if self._goal is not None:
                self.counters.rejected += 1
                self.counters.last_rejection = str(out.events[-1])
                self._goal = None
        elif out.events:
            self.counters.clamped += 1
        self.counters.missed_ticks += sum(int(e.value) for e in out.events if e.reason == "missed_ticks")

    def _clear_plan(self) -> None:
        self.source.clear()
        self._goal = None
