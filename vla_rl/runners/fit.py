"""The loop that runs every supervised fit to its end: progress bar, metrics, checkpoints, exact resume."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from episodes.files import write_json
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.numbers.finite import check_metrics
from sims.subproc.termination import Terminated, terminable, uninterrupted
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import flat_settings
from vla_rl.runs.changes import CHANGEABLE, PATHS, among
from vla_rl.runs.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.runs.metrics import MetricsWriter
from vla_rl.runs.progress import progress
from vla_rl.runs.quarantine import quarantine
from vla_rl.runs.run_dir import FIT_NOTE, LOCK_FILE, lock_folder


@runtime_checkable
class Fit(Protocol):
    """Something that is fitted in ``steps`` updates, ``step`` of which are done.

    ``state_dict`` is a tree that ``vla_rl.runs.checkpoint.save_tree`` accepts and holds everything that the next
    updates depend on: weights, optimizer, generators, position in the data.
    """

    @property
    def step(self) -> int: ...

    @property
    def steps(self) -> int: ...

    def update(self) -> dict[str, float]:
        """One optimizer step; its metrics."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def run_fit(
    fit: Fit,
    directory: Path,
    *,
    title: str,
    shown: str,
    record_every: int = 20,
    checkpoint_every: int = 200,
    checkpoint_s: float = math.inf,
) -> None:
    """Update ``fit`` until ``steps``, starting from the newest checkpoint in ``directory/checkpoints``, if any.

    Metrics go to ``directory/metrics.jsonl`` every ``record_every`` updates; the first update is iteration 1. The
    newest checkpoint is kept, the last one after the last update. There is one every ``checkpoint_every`` updates,
    once the newest is ``checkpoint_s`` seconds old, and after the update in which a signal to end arrives, which
    raises Terminated then. ``title`` names the progress bar, ``shown`` the metric beside it, which an update may lack:
    the earlier value stays.
    """
    checkpoints = directory / "checkpoints"
    if (latest := latest_checkpoint(checkpoints)) is not None:
        with crossing("checkpoint"):
            fit.load_state_dict(load_checkpoint(latest))
    with (
        MetricsWriter(directory, next_iteration=fit.step + 1, tensorboard=False) as record,
        progress(title, fit.steps, done=fit.step) as advance,
        terminable(),
    ):
        saved, saved_s = fit.step, time.monotonic()
        try:
            while fit.step < fit.steps:
                with quarantine(directory, "step", fit.step), uninterrupted():
                    metrics = fit.update()
                    check_metrics(metrics, where=title)
                    advance(note=f"{shown} {metrics[shown]:.4f}" if shown in metrics else "")
                    if fit.step % record_every == 0:
                        record.write(fit.step, metrics)
                    due = fit.step % checkpoint_every == 0 or time.monotonic() - saved_s > checkpoint_s
                    if due or fit.step == fit.steps:
                        save_checkpoint(checkpoints, fit.step, fit.state_dict(), keep=1)
                        saved, saved_s = fit.step, time.monotonic()
        except Terminated:
            if saved != fit.step:
                save_checkpoint(checkpoints, fit.step, fit.state_dict(), keep=1)
            raise


def settings_of_fit(experiment: Experiment, *sections: str) -> dict[str, Any]:
    """Those in ``sections`` that weights depend on, by dotted path; without paths, for which the hash of what is there
    is to be noted."""
    settings = flat_settings(experiment)
    return {key: settings[key] for key in settings if among(key, sections) and not among(key, (*CHANGEABLE, *PATHS))}


@contextmanager
def fit_folder(
    folder: Path, fitted_to: Mapping[str, Any], *, otherwise: UserError, beside: Sequence[str] = ()
) -> Iterator[None]:
    """``folder``, locked, with a note of what its fit depends on, as JSON values.

    Without this, checkpoints and models that are found there would be taken for those of the present settings, and
    metrics there be overwritten: UserError where there is anything and no note, where another process is fitting there,
    and ``otherwise`` where the note is of something else. A note that is alone there is of a fit that never began.
    ``beside``: names that say nothing of a fit.
    """

    def held() -> set[str]:
        found = {one.name for one in folder.iterdir()} - {*beside, LOCK_FILE} if folder.exists() else set()
        if found and FIT_NOTE not in found:
            raise UserError(f"{folder} holds files of something else than such a fit; choose a new or an empty folder")
        return found

    held()  # before the lock is made: what is refused stays as it is
    with lock_folder(folder):
        path = folder / FIT_NOTE
        if held() <= {FIT_NOTE}:
            write_json(path, dict(fitted_to))
        elif json.loads(path.read_text()) != json.loads(json.dumps(fitted_to)):
            raise otherwise
        yield
