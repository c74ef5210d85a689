"""The thread that drives an arm: every command tick measure, decide, filter, send; looks and records come after.

It asks for real-time priority; without the right to it, it runs as any thread and ``real_time`` says so.
"""

from __future__ import annotations

import gc
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from real_robot.control.loop import ControlLoop
from real_robot.priority import take_priority
from real_robot.ros.ros_io import CommandOutput, JointInput

# of the control thread; the rest of a node's process should have one that is lower
PRIORITY = 70
HAIR = 1e-3  # [rad or m]


class Timings:
    """The last thousand ticks: how late they began, and how old the joint measurement was when the command left."""

    def __init__(self) -> None:
        self.late_s: deque[float] = deque(maxlen=1000)
        self.sensor_to_command_s: deque[float] = deque(maxlen=1000)

    def summary(self) -> dict[str, str]:
        """Milliseconds, 50th and 99th percentile."""
        rows = {}
        for name, values in (("tick_jitter", self.late_s), ("sensor_to_command", self.sensor_to_command_s)):
            seen = list(values)
            for percent in (50, 99) if seen else ():
                rows[f"{name}_p{percent}_ms"] = f"{1000.0 * float(np.percentile(seen, percent)):.3f}"
        return rows


class ControlThread:
    """From ``start`` until ``brake``. ``lock`` guards the loop between this thread and others.

    ``afterwards(now_s)``: what may take milliseconds, called when the tick's command has left.
    """

    def __init__(
        self,
        loop: ControlLoop,
        joints: JointInput,
        output: CommandOutput,
        *,
        afterwards: Callable[[float], None] = lambda now_s: None,
    ) -> None:
        self.loop, self.lock, self.timings = loop, threading.Lock(), Timings()
        self.real_time = "not started"
        self._joints, self._output, self._afterwards = joints, output, afterwards
        self._thread = threading.Thread(target=self._run, name="control", daemon=True)
        self._running = self._resting = False

    @property
    def running(self) -> bool:
        return self._running

    def start(self) -> None:
        """From rest where the arm is measured to be. ValueError if that is unknown, old, or not inside the limits."""
        if not self._joints.fresh(self.loop.filter.limits.max_measurement_age_s):
            raise ValueError(self._joints.trouble)
        measured = self._joints.measure()
        assert measured is not None
        joints = self._at_limits(measured.positions)
        with self.lock:
            self.loop.warm_up(joints)
            if not self._running:
                gc.collect()
                gc.freeze()  # a collection that looks at every module takes ten ticks
            self.loop.start(joints, time.monotonic())
            self._resting = False
        if not self._running:
            self._running = True
            self._thread.start()

    def _at_limits(self, positions: Sequence[float]) -> list[float]:
        """A joint that is measured a hair beyond its limit stands at it."""
        inside = []
        for axis, q in zip(self.loop.filter.limits.axes, positions, strict=True):
            nearest = min(max(q, axis.position[0]), axis.position[1])
            inside.append(nearest if abs(q - nearest) <= HAIR else q)
        return inside

    def rest(self) -> None:
        """Brake to rest, then command nothing until ``start``: between episodes the arm may be moved by others."""
        with self.lock:
            self.loop.pause()
            self._resting = True

    def brake(self) -> None:
        """Brake to rest along the stop path, then end the thread. Returns when the arm is commanded still."""
        with self.lock:
            self.loop.pause()
        if self._running:
            self._running = False
            self._thread.join(timeout=10.0)

    def _run(self) -> None:
        """Every command tick until told to end and at rest. Sleeps to absolute times, so lateness never adds up."""
        self.real_time = take_priority(PRIORITY)
        period_s = 1.0 / self.loop.filter.limits.command_hz
        due_s = time.monotonic() + period_s
        while self._running or not self.loop.filter.at_rest:
            time.sleep(max(0.0, due_s - time.monotonic()))
            with self.lock:  # time is read inside: while this thread waits, a new episode may set the clock
                measured, now_s = self._joints.measure(), time.monotonic()
                silent = self._resting and self.loop.filter.at_rest
                if not silent:
                    out = self.loop.tick(measured, now_s)
                    stop_path = self.loop.filter.stop_path()
            if not silent:
                self._output.send(out, stop_path)
                self.timings.late_s.append(now_s - due_s)
                if measured is not None:
                    self.timings.sensor_to_command_s.append(time.monotonic() - measured.stamp_s)
            self._afterwards(now_s)
            due_s += period_s * max(1, round((now_s - due_s) / period_s) + 1)
