"""When each part of an iteration was: trace.json of a run, in Chrome's format, which https://ui.perfetto.dev opens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vla_rl.rollouts.timer import Span

TRACE_FILE = "trace.json"


class Timeline:
    """Of the first ``iterations`` that are added; the file is whole after each."""

    def __init__(self, path: Path, *, iterations: int) -> None:
        self._path, self.left = path, iterations
        self._events: list[dict[str, Any]] = []
        self._processes: dict[str, int] = {}

    def add(self, iteration: int, spans: Mapping[str, Sequence[Span]]) -> None:
        """``spans`` by process; "" is the one that learns."""
        if not self.left:
            return
        self.left -= 1
        own = spans.get("", ())
        if own:
            whole = Span(f"iteration {iteration}", own[0].began_s, _end(own[-1]) - own[0].began_s)
            self._add("iterations", [whole])
        for process, those in spans.items():
            self._add(process or "learner", those)
        self._path.write_text(json.dumps({"traceEvents": self._events, "displayTimeUnit": "ms"}))

    def _add(self, process: str, spans: Sequence[Span]) -> None:
        if process not in self._processes:
            number = self._processes[process] = len(self._processes)
            name = {"name": "process_name", "ph": "M", "pid": number, "args": {"name": process}}
            self._events += [
                name,
                {"name": "process_sort_index", "ph": "M", "pid": number, "args": {"sort_index": number}},
            ]
        number = self._processes[process]
        self._events += [
            {
                "name": span.name, "cat": "stage", "ph": "X", "pid": number, "tid": 0,
                "ts": round(1e6 * span.began_s, 1), "dur": round(1e6 * span.seconds, 1),
            }
            for span in spans
        ]  # fmt: skip


def _end(span: Span) -> float:
    return span.began_s + span.seconds
