"""Progress of long work on a terminal: done, rate, time left, and the latest figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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

console = Console(stderr=True)


class RateColumn(ProgressColumn):
    """Units per second."""

    def render(self, task: Task) -> Text:
        return Text(f"{task.speed:.1f}/s" if task.speed else "", style="cyan")


@runtime_checkable
class Advance(Protocol):
    def __call__(self, count: int = 1, note: str = "") -> None: ...


@contextmanager
def progress(title: str, total: int, *, done: int = 0) -> Iterator[Advance]:
    """A bar on standard error; where that is no terminal, one line when the work ends."""
    columns = (
        TextColumn("[bold]{task.description:<16}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        RateColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bars:
        bar = bars.add_task(title, total=total, completed=done, note="")

        def advance(count: int = 1, note: str = "") -> None:
            bars.advance(bar, count)
            if note:
                bars.update(bar, note=note)

        yield advance
