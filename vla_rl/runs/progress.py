"""Progress of long work: units done, rate, time left, and the latest metrics.

A bar on a terminal; elsewhere (a log file, a batch system) a line every LINE_EVERY_S seconds and one at the end.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol, runtime_checkable

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from vla_rl.heartbeat import beat

console = Console(stderr=True, force_jupyter=False)  # a notebook has no terminal either
LINE_EVERY_S = 30.0


class RateColumn(ProgressColumn):
    """Units per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="cyan")


@runtime_checkable
class Advance(Protocol):
    def __call__(self, count: int = 1, note: str = "") -> None: ...


class ProgressLines:
    """``advance`` of a place that is not a terminal: at most one line every LINE_EVERY_S seconds."""

    def __init__(self, title: str, total: int, *, done: int, afterwards_s: float | None) -> None:
        self.title, self.total, self.done, self.afterwards_s = title, total, done, afterwards_s
        self._first, self._note = done, ""
        self._began = self._written = time.monotonic()

    def __call__(self, count: int = 1, note: str = "") -> None:
        beat()
        self.done, self._note = self.done + count, note or self._note
        if time.monotonic() - self._written >= LINE_EVERY_S and self.done < self.total:
            self.write()

    def write(self) -> None:
        """The line of now."""
        self._written = time.monotonic()
        seconds, made = self._written - self._began, self.done - self._first
        parts = [f"{self.title} {self.done}/{self.total}", f"{duration(seconds)} so far"]
        if made and self.done < self.total:
            left = seconds / made * (self.total - self.done)
            parts.append(f"{duration(left)} left")
            if self.afterwards_s is not None:
                parts.append(f"{duration(left + self.afterwards_s)} left of the run")
        console.print(", ".join([*parts, *([self._note] if self._note else [])]), highlight=False, soft_wrap=True)


def duration(seconds: float) -> str:
    """As the bar's columns show it: hours:minutes:seconds."""
    return str(timedelta(seconds=round(seconds)))


@contextmanager
def progress(title: str, total: int, *, done: int = 0, afterwards_s: float | None = None) -> Iterator[Advance]:
    """On standard error. ``afterwards_s``: how long the rest of the run will take, where that is known."""
    if not console.is_terminal:
        lines = ProgressLines(title, total, done=done, afterwards_s=afterwards_s)
        yield lines
        lines.write()
        return
    columns = (
        TextColumn("[bold]{task.description:<16}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        TextColumn("{task.fields[whole]}"),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(title, total=total, completed=done, note="", whole="")

        def advance(count: int = 1, note: str = "") -> None:
            beat()
            bars.advance(bar, count)
            left = bars.tasks[0].time_remaining
            if afterwards_s is not None and left is not None:
                bars.update(bar, whole=f"run: {duration(left + afterwards_s)} left")
            if note:
                bars.update(bar, note=note)

        yield advance
