"""One arm's control loop without any wire: measurements and images in, safe commands out, all on absolute ticks.

Two rates on one grid: every ``command tick`` (100 Hz or so) a position goes through the safety filter to the
controller; every ``control tick`` (the policy's own rate) the next action becomes the goal that the commands move to
in a straight line. Inference is asked for and looked for, never waited for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from real_robot.chunk_scheduler import ChunkingConfig, ChunkRequest, ChunkScheduler
from real_robot.embodiment import Embodiment
from real_robot.policy_client import Answer
from real_robot.safety import Command, Measurement, RobotLimits, SafeCommand, SafetyFilter
from real_robot.wire import Act, Hello


class Oracle(Protocol):
    """Where answers come from: ``PolicyClient``."""

    def ask(self, act: Act) -> None: ...
    def poll(self) -> Answer | None: ...


class Eyes(Protocol):
    """The newest image of every camera and when it was taken [s, the loop's clock]; None while one is missing."""

    def look(self) -> tuple[Mapping[str, NDArray[np.uint8]], float] | None: ...


@dataclass(frozen=True, kw_only=True)
class LoopConfig:
    """``max_image_age_s``: with older images no action is asked for, so the arm runs out of plan and holds."""

    chunking: ChunkingConfig
    max_image_age_s: float = 0.2


@dataclass
class LoopCounters:
    """Since the start. ``late_chunks``: consumed more than planned; ``failed``: inferences without an answer."""

    control_ticks: int = 0
    actions: int = 0
    holds: int = 0
    chunks: int = 0
    late_chunks: int = 0
    failed: int = 0
    rejected: int = 0
    clamped: int = 0
    missed_ticks: int = 0
    last_rejection: str = ""


class ControlLoop:
    """``tick`` once per command period, with the time of a clock that never jumps."""

    def __init__(
        self,
        limits: RobotLimits,
        config: LoopConfig,
        *,
        hello: Hello,
        embodiment: Embodiment,
        oracle: Oracle,
        eyes: Eyes,
    ) -> None:
        check_policy(hello, embodiment, limits, config.chunking)
        self.filter = SafetyFilter(limits)
        self.counters = LoopCounters()
        self.instruction = ""
        self.paused = False
        self.trouble = ""
        self._config, self._embodiment, self._oracle, self._eyes = config, embodiment, oracle, eyes
        self._scheduler = ChunkScheduler(config.chunking, horizon=hello.action_horizon, action_dim=hello.action_dim)
        self._period = round(limits.command_hz / hello.control_hz)
        self._asked: ChunkRequest | None = None
        self._questions = 0
        # this control period's straight line, joint positions from and to
        self._from: list[float] = []
        self._goal: list[float] | None = None

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
            self._control(control_tick, measured, now_s)
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

    def _control(self, tick: int, measured: Measurement, now_s: float) -> None:
        """Take what arrived, ask for more, choose the goal of this control period."""
        self.counters.control_ticks += 1
        self._collect(tick)
        if self.paused or self.filter.stopped:
            self._goal = None
            return
        self._ask(tick, measured, now_s)
        action = self._scheduler.action(tick)
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

    def _collect(self, tick: int) -> None:
        answer, request = self._oracle.poll(), self._asked
        if answer is None or request is None or answer.id not in (self._questions, -1):
            return
        self._asked = None
        if answer.chunk is None:
            self.counters.failed += 1
            self.trouble = answer.reason
            self._scheduler.abandon(request)
            return
        try:
            delivery = self._scheduler.deliver(request, answer.chunk.actions, tick)
        except ValueError as error:
            self.counters.failed += 1
            self.trouble = str(error)
            return
        if delivery is not None:
            self.counters.chunks += 1
            self.counters.late_chunks += delivery.late
            self.trouble = ""

    def _ask(self, tick: int, measured: Measurement, now_s: float) -> None:
        request = self._scheduler.request(tick)
        if request is None:
            return
        seen = self._eyes.look()
        if seen is None or not abs(now_s - seen[1]) <= self._config.max_image_age_s:
            self.trouble = "no image from some camera" if seen is None else f"images are {now_s - seen[1]:.2f} s old"
            self._scheduler.abandon(request)
            return
        self._questions += 1
        self._asked = request
        chunking = self._config.chunking
        act = Act(
            id=self._questions,
            images=dict(seen[0]),
            state=self._embodiment.state(measured.positions),
            instruction=self.instruction,
            method=chunking.method,
            leftover=np.ascontiguousarray(request.leftover),
            delay=request.delay,
            execute_steps=chunking.execute_steps,
        )
        self._oracle.ask(act)

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
        self._scheduler.clear()
        self._asked = None
        self._goal = None


def check_policy(hello: Hello, embodiment: Embodiment, limits: RobotLimits, chunking: ChunkingConfig) -> None:
    """ValueError unless this policy is one for this arm."""
    for name in ("action_dim", "state_dim"):
        got, wanted = getattr(hello, name), getattr(embodiment, name)
        if got != wanted:
            raise ValueError(
                f"the policy has {name} {got}, this robot's embodiment has {wanted}: it is for another robot"
            )
    ratio = limits.command_hz / hello.control_hz
    if abs(ratio - round(ratio)) > 1e-6 or ratio < 1:
        raise ValueError(
            f"command_rate {limits.command_hz:g} Hz must be a multiple of the policy's {hello.control_hz:g} Hz"
        )
    if chunking.method == "prefix" and chunking.max_delay > hello.max_prefix:
        raise ValueError(
            f"chunking.max_delay is {chunking.max_delay}, the policy was trained with prefixes of at most "
            f"{hello.max_prefix}; lower it, or choose chunking.method: replace"
        )
    chunking.check(hello.action_horizon)
