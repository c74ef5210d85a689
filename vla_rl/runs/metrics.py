"""Numbers of a run: ``metrics.jsonl``, the record, and TensorBoard event files, a view of it.

A line of ``metrics.jsonl`` is one iteration: ``{"iteration": 3, "wall_s": 41.2, "<name>": value, ...}``. A value that
is not finite is written as null, since JSON has no NaN.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_FILE = "metrics.jsonl"


class Metrics:
    """Appends one line per iteration; each line is on disk when ``write`` returns.

    next_iteration: the first iteration that will be written. Records at or beyond it, left by a run that went on after
    its last checkpoint, and a torn last line are dropped, so a resumed file reads like an uninterrupted one.
    """

    def __init__(self, run_dir: Path, *, next_iteration: int = 0, tensorboard: bool = True) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        kept = [record for record in read_metrics(run_dir) if record["iteration"] < next_iteration]
        _replace(path, "".join(json.dumps(record) + "\n" for record in kept))
        self._file = path.open("a", encoding="utf-8")
        self._started = time.monotonic() - (kept[-1]["wall_s"] if kept else 0.0)
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=next_iteration)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Record ``values`` (anything ``float`` takes; one-element tensors too) for ``iteration``."""
        record: dict[str, Any] = {"iteration": iteration, "wall_s": round(time.monotonic() - self._started, 3)}
        for name, value in values.items():
            number = float(value)
            record[name] = number if math.isfinite(number) else None
            if self._board is not None:
                self._board.add_scalar(name, number, iteration)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every whole record, in order; a last line that a crash cut short is left out. No file: no records.

    Raises ValueError where a line before the last is no record.
    """
    path = run_dir / METRICS_FILE
    if not path.exists():
        return []
    *lines, _torn = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}: line {number} is no JSON record: {line[:60]!r}") from None
    return records


def _replace(path: Path, text: str) -> None:
    partial = path.with_suffix(".tmp")
    with partial.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
