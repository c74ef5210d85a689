"""Seconds per part of an iteration, and when each part was: a timeline."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Span:
    """One stretch of a section. ``began_s``: of the clock ``time.time``, which processes of a machine share."""

    name: str
    began_s: float
    seconds: float


class Timer:
    """Seconds per section since the last ``take``: ``with timer.section("simulate"): ...``.

    A section inside another counts for itself alone, so the sections add up to the time covered. ``record`` keeps the
    spans too.
    """

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}
        self._open: list[str] = []
        self._since = 0.0
        self._metrics: dict[str, float] = {}
        self._spans: dict[str, list[Span]] = {}
        self.recording = False
        self._epoch = time.time() - time.perf_counter()

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        self._charge()
        self._open.append(name)
        try:
            yield
        finally:
            self._charge()
            self._open.pop()

    def _charge(self) -> None:
        now = time.perf_counter()
        if self._open:
            name, seconds = self._open[-1], now - self._since
            self._seconds[name] = self._seconds.get(name, 0.0) + seconds
            if self.recording and seconds > 0:
                self.add_spans("", [Span(name, self._epoch + self._since, seconds)])
        self._since = now

    def now(self) -> Span | None:
        """The innermost section that is open, so far; read by other threads."""
        name, since = self._open[-1:], self._since
        return Span(name[0], self._epoch + since, time.perf_counter() - since) if name else None

    def take(self) -> dict[str, float]:
        """Metrics ``time/<section>_s`` of every section so far, and start again from zero."""
        self._charge()
        taken = {f"time/{name}_s": seconds for name, seconds in self._seconds.items()} | self._metrics
        self._seconds, self._metrics = {}, {}
        return taken

    def add_metrics(self, metrics: Mapping[str, float]) -> None:
        """Of other processes, for the next ``take``; where a name comes again the values add up."""
        for name, value in metrics.items():
            self._metrics[name] = self._metrics.get(name, 0.0) + value

    def add_shares(self, times: Mapping[str, float], count: int) -> None:
        """``times``: ``take`` of one of ``count`` collectors beside this; they become a mean over the collectors."""
        self.add_metrics({name.replace("time/", "collectors/"): seconds / count for name, seconds in times.items()})

    def record(self, on: bool) -> None:
        """Whether to keep spans from now on."""
        self.recording = on

    def add_spans(self, process: str, spans: Iterable[Span]) -> None:
        """``process``: another one, "" is this."""
        self._spans.setdefault(process, []).extend(spans)

    def take_spans(self) -> dict[str, list[Span]]:
        """Since the last call, by process, where they are recorded."""
        spans, self._spans = self._spans, {}
        return spans
