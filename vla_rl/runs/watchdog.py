"""Says in which stage a run hangs, and what every thread of it is doing."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar, TextIO

from vla_rl.heartbeat import beat, last_beat_s
from vla_rl.rollouts.timer import Timer
from vla_rl.runs.progress import console

WATCHDOG_FILE = "watchdog.txt"
LONGEST_PAUSE_S = 10.0  # between two looks


@contextmanager
def watched(stage: str, folder: Path | None, *, limit_s: float) -> Iterator[None]:
    """``watchdog`` of work that is one stage, with the signs of life of ``heartbeat.beat``, as progress bars give."""
    timer = Timer()
    with watchdog(timer, folder, limit_s=limit_s), timer.section(stage):
        yield


@contextmanager
def watchdog(timer: Timer, folder: Path | None, *, limit_s: float) -> Iterator[None]:
    """Where nothing moves for ``limit_s``, neither to another section of ``timer`` nor by a heartbeat: a line on
    standard error with the section, once, and the stacks of all threads in WATCHDOG_FILE, or on standard error without
    a ``folder``. The run goes on: a slow stage is not a wrong one. Of several that are nested the innermost reports,
    with the sections of all.

    Where a call holds Python's lock no thread of Python runs: then a thread of the interpreter's own writes the stacks,
    after twice the time.
    """
    with _report_file(folder) as file:
        _Watch.active.append(_Watch(timer, file, limit_s))
        try:
            with _Watch.active[-1].running():
                yield
        finally:
            _Watch.active.pop()
            beat()  # what is around it has not hung meanwhile


class _Watch:
    """``active``: of this process, the innermost last."""

    active: ClassVar[list[_Watch]] = []

    def __init__(self, timer: Timer, file: TextIO, limit_s: float) -> None:
        self.timer, self.file, self.limit_s = timer, file, limit_s
        self._reported: tuple[str, float, float] | None = None
        self._ended = threading.Event()

    @contextmanager
    def running(self) -> Iterator[None]:
        beat()
        thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()
            faulthandler.cancel_dump_traceback_later()

    def _watch(self) -> None:
        while not self._ended.wait(min(self.limit_s / 4, LONGEST_PAUSE_S)):
            if self.active[-1] is self:
                faulthandler.dump_traceback_later(2 * self.limit_s, file=self.file)
                self._look()

    def _look(self) -> None:
        now, last_s = self.timer.now(), last_beat_s()
        if now is None:
            return
        idle_s = min(now.seconds, time.perf_counter() - last_s)
        if idle_s > self.limit_s and (now.name, now.began_s, last_s) != self._reported:
            self._reported = now.name, now.began_s, last_s
            sections = [span.name for watch in self.active if (span := watch.timer.now()) is not None]
            self._report(f"stage {'/'.join(sections)!r} has not moved for {idle_s:.0f} s")

    def _report(self, line: str) -> None:
        self.file.write(line + "\n")
        self.file.flush()
        faulthandler.dump_traceback(self.file)
        console.print(f"{line}; what it is doing: {self.file.name}", highlight=False)


@contextmanager
def _report_file(folder: Path | None) -> Iterator[TextIO]:
    """Open all the time, as nobody opens one where Python's lock is held; an empty one does not stay."""
    if folder is None:
        assert sys.__stderr__ is not None
        yield sys.__stderr__
        return
    path = folder / WATCHDOG_FILE
    for outer in _Watch.active:
        if outer.file.name == str(path):
            yield outer.file
            return
    with path.open("a", encoding="utf-8") as file:
        yield file
    if not path.stat().st_size:
        path.unlink()
