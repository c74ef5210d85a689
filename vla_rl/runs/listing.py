"""The runs below a folder and the state of each (``vla-rl runs``)."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sims.errors import UserError
from vla_rl.runs.metrics import count_iterations, read_metrics
from vla_rl.runs.quarantine import QUARANTINE
from vla_rl.runs.result import RESULT_FILE, read_result
from vla_rl.runs.run_dir import COMMAND_FILE, LOCK_FILE, is_run, read_stages

State = Literal["running", "finished", "failed", "stopped", "damaged"]
NESTING = 3  # folders below the one that is given


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """``failed``: since its last start it left a traceback or a quarantined batch. ``stopped``: it can be resumed.
    ``damaged``: a file of it cannot be read, which ``damage`` names; nothing else is known of it.

    ``stage``: the last one that is complete. ``success``: of the final policy on held-out starts, in a run that is not
    finished that of the latest validation, None before it. ``age_s``: since it last wrote.
    """

    path: str
    state: State
    stage: str
    iterations: int
    success: float | None
    age_s: float
    bytes: int
    damage: str = ""


def list_runs(folder: Path) -> list[RunSummary]:
    """Every run in ``folder`` or a few folders below it, the latest first."""
    return sorted((summarize(run) for run in _run_dirs(folder)), key=lambda run: run.age_s)


def summarize(run_dir: Path) -> RunSummary:
    files = read_stats(Path(folder, name) for folder, _, names in os.walk(run_dir) for name in names)
    state, damage = state_of(run_dir), ""
    try:
        result, stages, metrics = read_result(run_dir), read_stages(run_dir), read_metrics(run_dir)
        iterations = count_iterations(run_dir)
    except UserError as error:
        result, stages, metrics, iterations = {}, {}, [], 0
        state, damage = "damaged", str(error)
    validations = [record["validation"] for record in metrics if record.get("validation") is not None]
    success = result["rl"]["success"] if "rl" in result else (validations[-1] if validations else None)
    return RunSummary(
        path=str(run_dir),
        state=state,
        stage=next(reversed(stages), ""),
        iterations=iterations,
        success=success,
        age_s=round(time.time() - max((file.st_mtime for file in files), default=0.0), 1),
        bytes=sum(file.st_size for file in files),
        damage=damage,
    )


def read_stats(paths: Iterable[Path]) -> list[os.stat_result]:
    """Of those that are there: files of a run that goes on come and go."""
    found = []
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            found.append(path.stat())
    return found


def state_of(run_dir: Path) -> State:
    if _is_locked(run_dir / LOCK_FILE):
        return "running"
    if (run_dir / RESULT_FILE).exists():
        return "finished"
    command = run_dir / COMMAND_FILE  # each start writes it
    started_ns = command.stat().st_mtime_ns if command.exists() else 0
    quarantined = (path.stat().st_mtime_ns for path in run_dir.rglob(f"{QUARANTINE}/*.safetensors"))
    failed = (run_dir / "traceback.txt").exists() or any(mtime_ns >= started_ns for mtime_ns in quarantined)
    return "failed" if failed else "stopped"


def _run_dirs(folder: Path, nesting: int = NESTING) -> Iterator[Path]:
    if is_run(folder):
        yield folder
    elif nesting and folder.is_dir():
        for inside in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from _run_dirs(inside, nesting - 1)


def _is_locked(path: Path) -> bool:
    if not path.exists():
        return False
    with path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
