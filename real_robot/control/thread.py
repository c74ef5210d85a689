"""The thread that drives an arm: every command tick it measures, decides, filters and sends; slow work comes after.

It requests real-time priority; without the permission it runs with ordinary priority and ``real_time`` says so. An
error in this thread, or of what it depends on (``checks``), stops the arm and is named.
"""

from __future__ import annotations

import gc
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from math import floor

import numpy as np

from real_robot.control.loop import ControlLoop
from real_robot.control.protocols import CommandSink, JointSource
from real_robot.priority import take_priority
from real_robot.safety.commands import Measurement

# of the control thread; the rest of a node's process should have one that is lower
PRIORITY = 70
CHECK_EVERY_S = 0.05
BRAKE_S = 10.0  # that braking may take
FRESH_WITHIN_S = 0.5


class Timings:
    """Of the last thousand ticks: lateness, and age of the joint measurement when the command was sent [s]."""

    def __init__(self) -> None:
        self.late_s: deque[float] = deque(maxlen=1000)
        self.sensor_to_command_s: deque[float] = deque(maxlen=1000)

    def summary(self) -> dict[str, str]:
        """Milliseconds, 50th and 99th percentile."""
        percentiles = {}
        for name, values in (("tick_jitter", self.late_s), ("sensor_to_command", self.sensor_to_command_s)):
            measured = list(values)
            for percent in (50, 99) if measured else ():
                percentiles[f"{name}_p{percent}_ms"] = f"{1000.0 * float(np.percentile(measured, percent)):.3f}"
        return percentiles


class ControlThread:
    """From ``start`` until ``brake``. ``lock`` guards the loop between this thread and others.

    ``after_tick(now_s)``: work that may take milliseconds, called when the tick's command has been sent. ``checks``:
    each returns why the arm must stop, or "".
    """

    def __init__(
        self,
        loop: ControlLoop,
        joints: JointSource,
        output: CommandSink,
        *,
        after_tick: Callable[[float], None] = lambda now_s: None,
        checks: Sequence[Callable[[], str]] = (),
    ) -> None:
        self.loop, self.lock, self.timings = loop, threading.Lock(), Timings()
        self.real_time, self.failure = "not started", ""
        self._joints, self._output, self._after_tick, self._checks = joints, output, after_tick, checks
        self._thread: threading.Thread | None = None
        self._running = False

    @property
    def running(self) -> bool:
        return self._running

    def start(self, begin: Callable[[], None] = lambda: None) -> None:
        """Start from rest at the measured position. ValueError if that is unknown, old, or not inside the limits.

        ``begin``: called when the start is not refused, before the first action is taken; it returns at once.
        """
        joints = self._measured().positions
        with self.lock:
            self.loop.warm_up(joints)
            if not self._running:
                gc.collect()
                gc.freeze()  # a full collection takes ten ticks
            self.loop.start(joints, time.monotonic())
            begin()
        if not self._running:
            self._running, self.failure = True, ""
            self._thread = threading.Thread(target=self._run, name="control", daemon=True)
            self._thread.start()

    def resume(self) -> None:
        """Take actions again. ValueError as ``ControlLoop.resume``, and if the arm's position is not known."""
        measured = self._measured()
        with self.lock:
            self.loop.resume(measured, time.monotonic())

    def stop(self, reason: str) -> None:
        """Latched protective hold."""
        with self.lock:
            self.loop.stop(reason)

    def release(self) -> None:
        """Unlatch the stop; the arm stays paused. ValueError while it is still braking."""
        with self.lock:
            self.loop.release()

    def pause(self) -> None:
        """Brake to rest, then send nothing until ``resume`` or ``start``."""
        with self.lock:
            self.loop.pause()

    def rest(self) -> None:
        """Brake to rest, then send nothing until ``start``: between episodes people or other nodes may move the arm."""
        with self.lock:
            self.loop.rest()

    def wait_for_rest(self) -> None:
        """Return when a stopped or paused arm is at rest and nothing is sent, after ``BRAKE_S`` at most."""
        deadline_s = time.monotonic() + BRAKE_S
        while self.loop.live and time.monotonic() < deadline_s:
            time.sleep(0.005)

    def brake(self) -> None:
        """Brake to rest along the stop path, then end the thread. Returns when the commanded speed is zero.

        If that is not so within ``BRAKE_S``, ``failure`` says it and the output is halted.
        """
        self.rest()
        if self._running:
            self._running = False
            assert self._thread is not None
            self._thread.join(timeout=BRAKE_S)
            if self._thread.is_alive():
                self.failure = self.failure or f"the arm did not come to rest within {BRAKE_S:g} s"
                self._output.halt()

    def _measured(self) -> Measurement:
        """Waits ``FRESH_WITHIN_S`` at most: this process or the arm's may have stood still just now."""
        until_s = time.monotonic() + FRESH_WITHIN_S
        while not self._joints.fresh(self.loop.filter.limits.max_measurement_age_s):
            if time.monotonic() > until_s:
                raise ValueError(self._joints.problem)
            time.sleep(0.005)
        measured = self._joints.measure()
        assert measured is not None
        return measured

    def _run(self) -> None:
        self.real_time = take_priority(PRIORITY)
        try:
            self._drive()
        except Exception as error:  # what was sent last ends in a stop, which the controller finishes
            traceback.print_exc()
            self._fail(error)
            try:
                self._output.halt()
            finally:
                self._end_after_failure()

    def _end_after_failure(self) -> None:
        """Show the stop, and let it be released when the controller has finished it."""
        self.stop(self.failure)
        self._do_slow_work(time.monotonic(), check=False)
        if self.loop.live:
            time.sleep(max(0.0, self.loop.filter.path()[-1].time_s - time.monotonic()))
        with self.lock:
            self.loop.filter.end()
            self._running = self.loop.live = False

    def _drive(self) -> None:
        """Every command tick until ``brake`` and at rest. Sleeps until absolute times, those of the loop's ticks:
        lateness does not add up.
        """
        hz = self.loop.filter.limits.command_hz
        tick = floor(time.monotonic() * hz) + 1
        due_s = check_s = tick / hz
        while self._running or (self.loop.live and not self.loop.filter.at_rest):
            time.sleep(max(0.0, due_s - time.monotonic()))
            with self.lock:  # time is read inside the lock: ``start`` may reset the clock meanwhile
                measured, now_s = self._joints.measure(), time.monotonic()
                live = self.loop.live
                out = self.loop.tick(measured, now_s)
                path = self.loop.filter.path() if out is not None else []
                halts = live and (out is None or not self.loop.live)  # after a pause, and at rest
            if out is not None:
                self._output.send(out, path)
                self.timings.late_s.append(now_s - due_s)
                if measured is not None:
                    self.timings.sensor_to_command_s.append(time.monotonic() - measured.stamp_s)
            if halts:
                self._output.halt()
            check = now_s >= check_s
            if check:
                check_s = now_s + CHECK_EVERY_S
            self._do_slow_work(now_s, check=check)
            tick = max(tick, round(now_s * hz)) + 1
            due_s = tick / hz

    def _do_slow_work(self, now_s: float, *, check: bool) -> None:
        """An error here stops the arm; the thread goes on, as it must brake it."""
        try:
            self._after_tick(now_s)
            for reason in [reason for problem in self._checks if (reason := problem())] if check else ():
                self.stop(reason)
        except Exception as error:
            if not self.failure:
                traceback.print_exc()
            self._fail(error)
            self.stop(self.failure)

    def _fail(self, error: Exception) -> None:
        self.failure = self.failure or f"the control thread failed: {type(error).__name__}: {error}"
