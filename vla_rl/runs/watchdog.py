"""Says in which stage a run hangs, and what every thread of it is doing."""

from __future__ import annotations

import faulthandler
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from vla_rl.rollouts.timer import Timer
from vla_rl.runs.progress import console

WATCHDOG_FILE = "watchdog.txt"


@contextmanager
def watchdog(timer: Timer, folder: Path, *, limit_s: float) -> Iterator[None]:
    """Where one stage of ``timer`` takes longer than ``limit_s``: a line on standard error, once for the stage, and the
    stacks of all threads in WATCHDOG_FILE. The run goes on: a slow stage is not a wrong one."""
    ended = threading.Event()

    def watch() -> None:
        reported: tuple[str, float] | None = None
        while not ended.wait(min(limit_s / 4, 10.0)):
            now = timer.now()
            if now is not None and now.seconds > limit_s and (now.name, now.began_s) != reported:
                reported = now.name, now.began_s
                _report(folder / WATCHDOG_FILE, now.name, now.seconds)

    thread = threading.Thread(target=watch, name="watchdog", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _report(path: Path, stage: str, seconds: float) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(f"stage {stage!r} has taken {seconds:.0f} s\n")
        file.flush()
        faulthandler.dump_traceback(file)
    console.print(f"stage {stage!r} has taken {seconds:.0f} s; what it is doing: {path}", highlight=False)
