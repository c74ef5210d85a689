"""Metrics of a run: ``metrics.jsonl``, and the same values as TensorBoard event files and in Weights & Biases.

A line of ``metrics.jsonl`` is one iteration: ``{"iteration": 3, "wall_s": 41.2, "<name>": value, ...}``. A value that
is not finite is written as null, because JSON has no NaN.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from episodes.files import write_atomically
from sims.errors import UserError

METRICS_FILE = "metrics.jsonl"
WANDB_ID = "wandb_id"  # file with the identifier of the run in Weights & Biases


class MetricsWriter:
    """Appends one line per iteration; each line is on disk when ``write`` returns.

    next_iteration: the first iteration that will be written. Records from it on, left by a run that was interrupted
    after its last checkpoint, and an incomplete last line are dropped, so a resumed file equals an uninterrupted one.
    wandb: a project of Weights & Biases that gets the values too; a resumed run goes on there.
    """

    def __init__(
        self, run_dir: Path, *, next_iteration: int = 0, tensorboard: bool = True, wandb: str | None = None
    ) -> None:
        if wandb is not None:
            check_wandb()
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / METRICS_FILE
        kept = [record for record in read_metrics(run_dir) if record["iteration"] < next_iteration]
        write_atomically(path, "".join(json.dumps(record) + "\n" for record in kept).encode())
        self._file = path.open("a", encoding="utf-8")
        self._started = time.monotonic() - (kept[-1]["wall_s"] if kept else 0.0)
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_dir / "tensorboard"), purge_step=next_iteration)

        self._wandb: Any = None if wandb is None else _open_wandb(wandb, run_dir)

    def write(self, iteration: int, values: Mapping[str, float]) -> None:
        """Record ``values`` (anything ``float`` takes; one-element tensors too) for ``iteration``."""
        record: dict[str, Any] = {"iteration": iteration, "wall_s": round(time.monotonic() - self._started, 3)}
        for name, value in values.items():
            number = float(value)
            record[name] = number if math.isfinite(number) else None
            if self._board is not None:
                self._board.add_scalar(name, number, iteration)
        if self._wandb is not None:
            self._wandb.log({name: float(value) for name, value in values.items()}, step=iteration)
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()
        if self._wandb is not None:
            self._wandb.finish()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_wandb() -> None:
    """Raises UserError if Weights & Biases is not installed."""
    if find_spec("wandb") is None:
        raise UserError("wandb: Weights & Biases is not installed. Run: pip install wandb, or leave the setting out")


def _open_wandb(project: str, run_dir: Path) -> Any:
    """Folders of several runs have the same name, so the identifier is random."""
    import wandb

    path = run_dir / WANDB_ID
    if not path.exists():
        write_atomically(path, secrets.token_hex(8).encode())
    return wandb.init(project=project, name=str(run_dir), id=path.read_text(), resume="allow", dir=str(run_dir))


def read_metrics(run_dir: Path) -> list[dict[str, Any]]:
    """Every complete record, in order; an incomplete last line is left out. No file: no records.

    Raises UserError where a line before the last is not a record.
    """
    return read_records(run_dir / METRICS_FILE, numbered="iteration")


def count_iterations(run_dir: Path) -> int:
    """Recorded so far, in imagination too. UserError as of ``read_metrics``."""
    return sum(len(read_metrics(folder)) for folder in (run_dir, *run_dir.glob("imagination/round_*")))


def read_records(path: Path, *, numbered: str | None = None) -> list[dict[str, Any]]:
    """Of any file with a JSON record per line, as ``read_metrics``. ``numbered``: an integer that every record has."""
    if not path.exists():
        return []
    *lines, _incomplete = path.read_bytes().split(b"\n")
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if not isinstance(record, dict) or (numbered is not None and not isinstance(record.get(numbered), int)):
            what = "a JSON record" if numbered is None else f"a JSON record of an {numbered}"
            raise UserError(f"{path}: line {number} is not {what}, repair or delete it: {line[:60]!r}")
        records.append(record)
    return records
