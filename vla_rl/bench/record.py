"""Rows of a benchmark, the machine they were measured on, and the files in benchmarks/results."""

from __future__ import annotations

import datetime
import json
import os
import platform
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from episodes.files import write_json
from vla_rl.runs.run_dir import git_revision

Row = dict[str, Any]
VERSIONS = ("torch", "mujoco", "numpy")
CALL = ("command", "date", "revision", "machine", "versions")  # where the rows of a record come from
RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


def row(
    name: str, value: float | None, unit: str, *, ratio: float | None = None, against: str | None = None, **more: Any
) -> Row:
    """One figure; ``ratio``: of ``value`` to the row or quotient that ``against`` names."""
    return {"name": name, "value": value, "unit": unit, "ratio": ratio, "against": against, **more}


def machine() -> dict[str, Any]:
    """The hardware and settings that a measured speed depends on."""
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
    }


def write_record(
    name: str, rows: Sequence[Row], *, command: str, kept: Collection[str] = (), folder: Path = RESULTS, **more: Any
) -> Path:
    """Write benchmarks/results/NAME.json: the rows, the command, date, revision, machine and versions.

    ``kept``: names of rows that were measured by an earlier call, as the file says; ``measured`` of such a row holds
    command, date, revision, machine and versions of that call.
    """
    path, measured = folder / f"{name}.json", _measured(read_record(name, folder), kept)
    path.parent.mkdir(exist_ok=True)
    record = {
        "command": command,
        "date": datetime.date.today().isoformat(),
        "revision": git_revision(),
        "machine": machine() | {"load": os.getloadavg()},
        "versions": {"python": platform.python_version()} | {name: version(name) for name in VERSIONS},
        **more,
        "rows": [{"interval": None, "seeds": None, **one, **measured.get(one["name"], {})} for one in rows],
    }
    write_json(path, record)
    return path


def add_to_record(name: str, rows: Sequence[Row], *, command: str, folder: Path = RESULTS, **more: Any) -> Path:
    """As ``write_record``; what else the record holds stays: rows of other names, before these, and other keys."""
    earlier, again = read_record(name, folder), {one["name"] for one in rows}
    others = [one for one in earlier.get("rows", ()) if one["name"] not in again]
    kept = [one["name"] for one in others]
    more = {key: value for key, value in earlier.items() if key not in (*CALL, "rows")} | more
    return write_record(name, [*others, *rows], command=command, kept=kept, folder=folder, **more)


def _measured(earlier: Mapping[str, Any], kept: Collection[str]) -> dict[str, Row]:
    """``measured`` of the rows named in ``kept``, which ``earlier`` tells."""
    own = {one["name"]: one["measured"] for one in earlier.get("rows", ()) if "measured" in one}
    return {name: {"measured": own.get(name) or {key: earlier[key] for key in CALL}} for name in kept}


def read_record(name: str, folder: Path = RESULTS) -> dict[str, Any]:
    """What ``folder``'s NAME.json holds; nothing where it was never measured."""
    path = folder / f"{name}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def median_seconds(
    work: Callable[[], object], *, repeats: int = 5, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Median duration of ``repeats`` calls, after one call to warm up; a GPU's work counts until it is done."""
    times = []
    for _ in range(repeats + 1):
        started = clock()
        work()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        times.append(clock() - started)
    return sorted(times[1:])[repeats // 2]
