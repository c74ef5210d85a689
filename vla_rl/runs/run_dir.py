"""A run's folder: what is where, which stages are done, and who may write."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from sims.errors import UserError
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config, save_config


@dataclass(frozen=True, kw_only=True)
class Run:
    """config.yaml, command.txt, stages.json, demonstrations/, imitation/, checkpoints/, metrics.jsonl, bundle/,
    videos/, result.json, report.html"""

    experiment: Experiment
    dir: Path
    lock: TextIO

    @property
    def demonstrations(self) -> Path:
        return self.dir / "demonstrations"

    @property
    def imitation(self) -> Path:
        return self.dir / "imitation"

    @property
    def checkpoints(self) -> Path:
        return self.dir / "checkpoints"

    @property
    def bundle(self) -> Path:
        return self.dir / "bundle"

    @property
    def videos(self) -> Path:
        return self.dir / "videos"

    def stages(self) -> dict[str, dict[str, Any]]:
        """What has been completed, with its result and wall-clock seconds."""
        path = self.dir / "stages.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """The stage's record. A pending one is written when the block ends and has set ``result``."""
        stage = Stage(self.stages().get(name, {}))
        pending, started = stage.pending, time.monotonic()
        yield stage
        if pending:
            stage.result = {"wall_s": round(time.monotonic() - started, 2), **stage.result}
            write_json(self.dir / "stages.json", self.stages() | {name: stage.result})


@dataclass
class Stage:
    """A stage of a run and its result, empty while it is pending."""

    result: dict[str, Any]

    @property
    def pending(self) -> bool:
        return not self.result


def open_run(experiment: Experiment, directory: Path, *, resume: bool, command: str) -> Run:
    """Create the folder, or come back to it. ``command`` is how a person would start the same run again.

    Raises UserError if it holds a run and ``resume`` is not set, if it was started with another configuration, or if
    another process is writing it.
    """
    config = directory / "config.yaml"
    if config.exists():
        if not resume:
            raise UserError(f"{directory} holds a run already; add --resume to go on, or choose another --run-dir")
        if load_config(Experiment, config) != experiment:
            raise UserError(f"{directory} was started with other settings (see {config}); choose another --run-dir")
    elif resume:
        raise UserError(f"{directory} holds no run to resume; leave --resume out to start one")
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / ".lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise UserError(f"{directory} is being written by another process; choose another --run-dir") from None
    if not config.exists():
        (directory / "command.txt").write_text(command + "\n")
        save_config(experiment, config)
    return Run(experiment=experiment, dir=directory, lock=lock)


def load_experiment(directory: Path) -> Experiment:
    """The resolved configuration of a run's folder."""
    if not (directory / "config.yaml").exists():
        raise UserError(f"{directory} is not the folder of a run: it has no config.yaml")
    return load_config(Experiment, directory / "config.yaml")


def write_json(path: Path, value: Any) -> None:
    """Whole or not at all."""
    partial = path.with_name(path.name + ".tmp")
    with partial.open("w") as file:
        json.dump(value, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


def git_revision() -> str | None:
    """Of the checkout this program runs from; None if it was installed from a package."""
    here = Path(__file__).resolve().parent
    answer = subprocess.run(["git", "-C", str(here), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    return answer.stdout.strip() if answer.returncode == 0 else None
