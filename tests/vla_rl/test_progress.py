"""Progress where there is no terminal: lines now and then, with the time left of the work and of the run."""

from __future__ import annotations

import pytest

from vla_rl.runs import progress as module
from vla_rl.runs.progress import duration, progress


def test_lines_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(module.time, "monotonic", lambda: now)
    monkeypatch.setattr(module, "console", module.Console(stderr=True))
    with progress("reinforce", 10, done=4, afterwards_s=100) as advance:
        for second in (20.0, 40.0, 50.0, 60.0, 70.0, 80.0):
            now = second
            advance(note=f"success {second / 100:.2f}")
    assert capsys.readouterr().err.splitlines() == [
        "reinforce 6/10, 0:00:40 so far, 0:01:20 left, 0:03:00 left of the run, success 0.40",
        "reinforce 9/10, 0:01:10 so far, 0:00:14 left, 0:01:54 left of the run, success 0.70",
        "reinforce 10/10, 0:01:20 so far, success 0.80",
    ]


def test_durations() -> None:
    assert [duration(seconds) for seconds in (0.4, 61, 7265)] == ["0:00:00", "0:01:01", "2:01:05"]
