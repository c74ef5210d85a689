"""The thread that drives an arm: what happens when something in it, or beside it, fails."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from real_robot.control.embodiment import JointSteps
from real_robot.control.loop import Action, ControlLoop
from real_robot.control.thread import ControlThread
from real_robot.safety.commands import Measurement, PathPoint, SafeCommand
from tests.real_robot.test_control_loop import LIMITS, SCALES

STILL = (0.0, 0.0)


class Arm:
    """Joints and controller: the joints are where they were sent. ``speed``: what a controller of velocities keeps."""

    def __init__(self) -> None:
        self.problem, self.sent, self.error = "", [], ""
        self.speed: tuple[float, ...] = STILL
        self.old_until_s = 0.0
        self.sends, self.hangs = threading.Event(), False
        self.sends.set()
        self._loop: ControlLoop | None = None

    def follow(self, loop: ControlLoop) -> None:
        self._loop = loop

    def measure(self) -> Measurement | None:
        if self.error:
            raise RuntimeError(self.error)
        now = time.monotonic()
        started = self._loop is not None and self._loop.live
        return Measurement(self._loop.filter.sent_position(now) if started else [0.0, 0.0], now)

    def fresh(self, max_age_s: float) -> bool:
        return time.monotonic() > self.old_until_s

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        self.hangs = not self.sends.is_set()
        self.sends.wait()
        self.sent.append(path[-1])
        self.speed = out.velocities

    def halt(self) -> None:
        self.speed = STILL


class Swinging:
    """An action source that never rests."""

    def action(self, tick: int, measured: Measurement, lead_ticks: int) -> Action | None:
        return Action(np.array([np.sin(0.3 * tick), 0.0], dtype=np.float32), measured.stamp_s)

    def executed(self, tick: int, action: np.ndarray) -> None:
        """Nothing is recorded."""

    def clear(self) -> None:
        """Nothing is planned."""


def wait(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


Driven = tuple[Arm, ControlThread, dict[str, Any]]


@pytest.fixture
def driven() -> Iterator[Driven]:
    with driven_arm() as driven:
        yield driven


@contextmanager
def driven_arm(lead_s: float = 0.0) -> Iterator[Driven]:
    """An arm in motion; ``faults``: error and duration of the slow work, reason of a check."""
    arm, faults = Arm(), {"error": None, "reason": "", "pause_s": 0.0}
    embodiment = JointSteps(SCALES.ranges, SCALES.steps)
    loop = ControlLoop(LIMITS, control_hz=20.0, embodiment=embodiment, source=Swinging(), lead_s=lead_s)
    arm.follow(loop)

    def slow_work(now_s: float) -> None:
        if faults["error"]:
            raise ValueError(faults["error"])
        time.sleep(faults.pop("pause_s", 0.0))

    thread = ControlThread(loop, arm, arm, after_tick=slow_work, checks=[lambda: str(faults["reason"])])
    thread.start()
    wait(lambda: any(abs(v) > 0.05 for v in loop.filter.path()[0].velocities))
    yield arm, thread, faults
    arm.error = ""
    thread.brake()


def test_an_error_after_a_tick_stops_the_arm_and_is_named(driven: tuple) -> None:
    _, thread, faults = driven
    faults["error"] = "a very odd image"
    wait(lambda: thread.loop.mode == "stopped")
    assert "the control thread failed: ValueError: a very odd image" in str(thread.loop.filter.stopped)
    wait(lambda: not thread.loop.live)
    assert thread.loop.filter.at_rest
    assert thread.running  # it braked the arm, and can be asked


def test_the_end_of_a_part_stops_the_arm_and_is_named(driven: tuple) -> None:
    _, thread, faults = driven
    faults["reason"] = "a thread ended: recorder"
    wait(lambda: not thread.loop.live)
    assert thread.loop.filter.stopped == "a thread ended: recorder"


def test_an_error_in_the_control_thread_itself_is_named(driven: tuple) -> None:
    arm, thread, _ = driven
    arm.error = "no such joint"
    wait(lambda: not thread.running)
    assert thread.failure == "the control thread failed: RuntimeError: no such joint"
    assert not any(arm.sent[-1].velocities)  # what was sent last ends in a stop
    assert arm.speed == STILL


def test_after_an_error_in_the_control_thread_the_stop_is_shown_and_can_be_released(driven: tuple) -> None:
    arm, thread, _ = driven
    shown: list[str | None] = []
    thread._after_tick = lambda now_s: shown.append(thread.loop.filter.stopped)
    arm.error = "no such joint"
    wait(lambda: not thread.running)
    assert shown[-1] == "the control thread failed: RuntimeError: no such joint"
    arm.error = ""
    with thread.lock:
        thread.loop.release()
    thread.start()
    assert thread.failure == ""
    wait(lambda: any(abs(v) > 0.05 for v in thread.loop.filter.path()[0].velocities))
    thread.brake()
    assert thread.loop.filter.stopped is None


def test_a_thread_that_does_not_end_is_named_and_the_output_halted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("real_robot.control.thread.BRAKE_S", 0.2)
    with driven_arm() as (arm, thread, _):
        arm.sends.clear()  # the controller's driver hangs
        wait(lambda: arm.hangs)
        arm.speed = (0.1, 0.0)
        thread.brake()
        assert thread.failure == "the arm did not come to rest within 0.2 s"
        assert arm.speed == STILL
        arm.sends.set()
        wait(lambda: not thread.loop.live)


@pytest.mark.parametrize("command_hz", [40.0, 200.0])
def test_checks_come_as_often_at_every_rate_of_commands(command_hz: float) -> None:
    times: list[float] = []

    def check() -> str:
        times.append(time.monotonic())
        return ""

    arm, limits = Arm(), replace(LIMITS, command_hz=command_hz)
    embodiment = JointSteps(SCALES.ranges, SCALES.steps)
    loop = ControlLoop(limits, control_hz=20.0, embodiment=embodiment, source=Swinging())
    arm.follow(loop)
    thread = ControlThread(loop, arm, arm, checks=[check])
    thread.start()
    time.sleep(1.5)
    thread.brake()
    assert 0.045 <= float(np.median(np.diff(times))) < 0.09


@pytest.mark.parametrize("lead_s", [0.0, 0.1])
@pytest.mark.parametrize("end", [ControlThread.rest, ControlThread.brake, lambda thread: thread.stop("test")])
def test_a_controller_of_velocities_is_left_at_zero(end: Callable[[ControlThread], None], lead_s: float) -> None:
    with driven_arm(lead_s) as (arm, thread, _):
        end(thread)
        wait(lambda: not thread.loop.live)
        time.sleep(0.05)
        assert arm.speed == STILL


@pytest.mark.parametrize("lead_s", [0.0, 0.1])
def test_a_controller_of_velocities_is_halted_after_a_pause_of_the_thread(lead_s: float) -> None:
    with driven_arm(lead_s) as (arm, thread, faults):
        faults["pause_s"] = 0.08  # more than a third of the lead
        wait(lambda: thread.loop.filter.lost)
        wait(lambda: arm.speed == STILL)
        assert not thread.loop.filter.at_rest  # an arm with times brakes by the stop that it has


def test_a_start_waits_a_little_for_joints_that_are_old() -> None:
    with driven_arm() as (arm, thread, _):
        thread.rest()
        wait(lambda: not thread.loop.live)
        arm.old_until_s, arm.problem = time.monotonic() + 0.2, "joint states are 0.24 s old"
        thread.start()
        assert thread.loop.live
        thread.rest()
        wait(lambda: not thread.loop.live)
        arm.old_until_s = time.monotonic() + 60.0
        for begin in (thread.start, thread.resume):
            with pytest.raises(ValueError, match=r"0\.24 s old"):
                begin()
        assert not thread.loop.live


@pytest.mark.parametrize("share", [0.0, 0.3, 0.5, 0.9])
def test_every_start_has_its_ticks_where_the_thread_has_them(share: float) -> None:
    """Half a period beside them, a call would be early or late by turns, and miss ticks that nobody missed."""
    with driven_arm() as (_, thread, _):
        thread.rest()
        wait(lambda: not thread.loop.live)
        period_s = 1.0 / LIMITS.command_hz
        while not share <= time.monotonic() / period_s % 1.0 < share + 0.1:
            """Until this share of a period has passed."""
        thread.start()
        wait(lambda: thread.loop.counters.control_ticks > 5)
        with thread.lock:
            ticks = np.array([point.time_s for point in thread.loop.filter.path()]) / period_s
        assert np.abs(ticks - np.round(ticks)).max() < 1e-3
