"""What a run leaves when a number in it is not finite: the batch, and how to repeat it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sims.errors import RunFailure
from sims.numbers.finite import NotFinite
from vla_rl.runs.checkpoint import latest_checkpoint, save_tree
from vla_rl.runs.run_dir import COMMAND_FILE, run_of

QUARANTINE = "quarantine"


@contextmanager
def quarantine(folder: Path, unit: str, number: int, *, start: Path | None = None) -> Iterator[None]:
    """Around the work of iteration ``number`` (``unit``: what is counted), whose checkpoints are in ``folder``.

    NotFinite becomes a RunFailure with iteration, quantity and batch; ``folder``/quarantine keeps the tensors, and
    where an update failed also its state before the step, for ``vla-rl replay``. ``start``: the bundle of the policy,
    kept as the path from ``folder``.
    """
    try:
        yield
    except NotFinite as error:
        path = folder / QUARANTINE / f"{unit}_{number:06d}.safetensors"
        path.parent.mkdir(exist_ok=True)
        record = {"quantity": error.quantity, "value": error.value, "where": error.where, "batch": error.batch}
        bundle = None if start is None else os.path.relpath(start.resolve(), folder.resolve())  # the run may be moved
        save_tree(path, record | {unit: number, "update": error.update, "start": bundle})
        raise RunFailure(f"{unit} {number}: {error}. {_next_step(folder, path)}") from error


def _next_step(folder: Path, path: Path) -> str:
    last = latest_checkpoint(folder / "checkpoints")
    kept = f"the last finite checkpoint is {last}" if last is not None else "there is no checkpoint yet"
    run = run_of(folder)
    again = "" if run is None else f"; to repeat it from there: {(run / COMMAND_FILE).read_text().strip()} --resume"
    return f"The batch is kept; see it with: {shlex.join(['vla-rl', 'replay', str(path)])}; {kept}{again}"
