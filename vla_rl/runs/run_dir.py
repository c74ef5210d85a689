"""The folder of a run: its files, the stages that are complete, and a lock against a second writer."""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from episodes.files import write_json
from policies.bundle import MANIFEST
from policies.device import Device, select_device
from sims.errors import UserError, is_disk_full, reason
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.config.loader import load_config, save_config
from vla_rl.rewards.registry import reward_sha256
from vla_rl.runs.changes import EVALUATIONS, check_changes
from vla_rl.runs.checkpoint import iteration_of, latest_checkpoint
from vla_rl.runs.metrics import METRICS_FILE, read_metrics
from vla_rl.runs.progress import console
from vla_rl.runs.result import RESULT_FILE
from vla_rl.runs.watchdog import watched

CONFIG_FILE, COMMAND_FILE, STAGES_FILE, CHECKPOINTS = "config.yaml", "command.txt", "stages.json", "checkpoints"
LOCK_FILE = ".lock"
REWARD_FILE = "reward.txt"  # sha256 of the reward model that the run is trained with
FIT_NOTE = "fitted_to.json"  # what a fit in the folder depends on (vla_rl/runners/fit.py)
SWEEP_FILE = "sweep.yaml"
# A folder that has one of them and no CONFIG_FILE is of something else: a run would take them for its own.
OTHERS = (STAGES_FILE, METRICS_FILE, CHECKPOINTS, "bundle", FIT_NOTE, SWEEP_FILE)
OUTCOME = (RESULT_FILE, "report.html")  # made of all stages, when the last is complete
LOCK_S = 1.0  # how long a lock is waited for: who asks whether a run is locked holds it for an instant


@dataclass(frozen=True, kw_only=True)
class Run:
    """``device``: where all of it computes. Files: config.yaml, command.txt, device.txt, reward.txt, stages.json,
    demonstrations/, imitation/, checkpoints/, metrics.jsonl, bundle/, videos/, result.json, report.html"""

    experiment: Experiment
    device: Device
    dir: Path
    lock: TextIO
    _open: list[OpenStage] = field(default_factory=list)  # the innermost last

    @property
    def demonstrations(self) -> Path:
        return self.dir / "demonstrations"

    @property
    def started_from(self) -> list[Path]:
        """The stores of recorded episodes that the first policy is cloned from; none where it is a bundle's alone."""
        start = self.experiment.start
        own = [self.demonstrations] if isinstance(start, Imitation) else []
        return own if start.store is None else [start.store]

    @property
    def imitation(self) -> Path:
        return self.dir / "imitation"

    @property
    def checkpoints(self) -> Path:
        return self.dir / CHECKPOINTS

    @property
    def bundle(self) -> Path:
        return self.dir / "bundle"

    @property
    def videos(self) -> Path:
        return self.dir / "videos"

    def stages(self) -> dict[str, dict[str, Any]]:
        """The completed stages, each with its result and wall-clock seconds."""
        return read_stages(self.dir)

    def inside(self, path: Path) -> str:
        """``path`` relative to the folder, for a stage's result: the folder can be moved."""
        return str(path.relative_to(self.dir))

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """The stage's record. A pending one is watched, and written when the block ends and has set ``result``.

        ``wall_s``: without the stages inside it, each of which names it in ``inside``.
        """
        stage = Stage(self.stages().get(name, {}))
        if not stage.pending:
            yield stage
            return
        outer, this = self._open[-1] if self._open else None, OpenStage(name)
        self._open.append(this)
        started = time.monotonic()
        try:
            with watched(name, self.dir, limit_s=self.experiment.watchdog_s):
                yield stage
        finally:
            self._open.pop()
        seconds = time.monotonic() - started
        place = {}
        if outer is not None:
            outer.inside_s += seconds
            place = {"inside": outer.name}
        stage.result = {"wall_s": round(seconds - this.inside_s, 2), **place, **stage.result}
        write_json(self.dir / STAGES_FILE, self.stages() | {name: stage.result})


@dataclass
class OpenStage:
    """A stage that is under way; ``inside_s``: of the stages inside it that are complete."""

    name: str
    inside_s: float = 0.0


@dataclass
class Stage:
    """A stage of a run and its result, empty while it is pending."""

    result: dict[str, Any]

    @property
    def pending(self) -> bool:
        return not self.result


def stage_seconds(run_dir: Path, name: str) -> float:
    """Wall-clock seconds of a stage and of those inside it, in all processes.

    Of reinforcement that was resumed, those of the iterations: the stage's own are those of its last part.
    """
    stages = read_stages(run_dir)
    own = sum(one["wall_s"] for other, one in stages.items() if name in (other, one.get("inside")))
    iterations = [record["wall_s"] for record in read_metrics(run_dir)] if name == "reinforce" else []
    return round(max([own, *iterations]), 2)


def evaluation_seconds(run_dir: Path) -> float:
    """Wall-clock seconds of the final evaluations, controls included."""
    return round(sum(one["wall_s"] for name, one in read_stages(run_dir).items() if name in EVALUATIONS), 2)


def check_folder(experiment: Experiment, directory: Path, *, resume: bool) -> set[str]:
    """Completed stages that changed settings make pending again; changes nothing.

    Raises UserError if the folder holds a run and ``resume`` is not set, if it holds something else, or if it was
    started with settings that differ and must not (``vla_rl/runs/changes.py``).
    """
    config = directory / CONFIG_FILE
    if directory.exists() and not directory.is_dir():
        raise UserError(f"{directory} is a file; choose another --run-dir")
    if not config.exists():
        if resume:
            raise UserError(f"{directory} holds no run to resume; leave --resume out to start one")
        if held := [name for name in OTHERS if (directory / name).exists()]:
            raise UserError(
                f"{directory} holds {held[0]} and no {CONFIG_FILE}: it is of something else; choose another --run-dir"
            )
        return set()
    if not resume:
        raise UserError(f"{directory} already holds a run; add --resume to continue, or choose another --run-dir")
    reinforced = read_stages(directory).get("reinforce", {}).get("iterations", 0)
    latest = latest_checkpoint(directory / CHECKPOINTS)
    done = iteration_of(latest) if latest is not None else 0
    repeated = check_changes(load_config(Experiment, config), experiment, done=done, where=str(directory))
    if latest is None and reinforced and "reinforce" in repeated:
        raise UserError(
            f"{directory} has no checkpoint of its {reinforced} iterations any longer, so it cannot go on; start "
            f"another run from its policy: --start.name bundle --start.path {directory / 'bundle'}"
        )
    return repeated


def open_run(experiment: Experiment, directory: Path, *, resume: bool, command: str) -> Run:
    """Create the folder, or open it again. ``command``: how to start the same run again in a shell.

    The traceback of an earlier attempt is removed, and the result where stages that it is of are repeated. Raises
    UserError as ``check_folder``, if this machine lacks the device, if the run was started with another reward model,
    and if another process is writing the folder.
    """
    device, repeated = experiment_device(experiment), check_folder(experiment, directory, resume=resume)
    reward = _checked_reward(experiment, directory)
    lock = lock_folder(directory)
    if repeated:
        for name in OUTCOME:
            (directory / name).unlink(missing_ok=True)
        kept = {name: result for name, result in read_stages(directory).items() if name not in repeated}
        write_json(directory / STAGES_FILE, kept)
    (directory / COMMAND_FILE).write_text(command + "\n")
    (directory / "traceback.txt").unlink(missing_ok=True)
    save_config(experiment, directory / CONFIG_FILE)
    _note_device(directory / "device.txt", device)
    if reward is not None:
        (directory / REWARD_FILE).write_text(reward + "\n")
    return Run(experiment=experiment, device=device, dir=directory, lock=lock)


def lock_folder(directory: Path) -> TextIO:
    """Make the folder and keep other processes from writing it until the file is closed. UserError where one does."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / LOCK_FILE).open("w")
    except OSError as error:
        if is_disk_full(error):
            raise
        raise UserError(f"{directory} cannot be created or written ({reason(error)}); choose another folder") from error
    until = time.monotonic() + LOCK_S
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.02)
                continue
            lock.close()
            taken = f"{directory} is being written by another process; wait for it, or choose another folder"
            raise UserError(taken) from None
        return lock


def experiment_device(experiment: Experiment) -> Device:
    """The device that the experiment computes on. UserError if this machine does not have it."""
    return select_device(experiment.device, precision=experiment.precision, compile=experiment.compile)


def _note_device(path: Path, device: Device) -> None:
    """Write where the run computes; say so if it was elsewhere before."""
    kind = device.device.type
    if path.exists() and (before := path.read_text().strip()) != kind:
        console.print(
            f"this run computed on {before} and continues on {kind}: the last bits of its numbers may differ from "
            "those of a run on one device, and its random numbers do"
        )
    path.write_text(kind + "\n")


def _checked_reward(experiment: Experiment, directory: Path) -> str | None:
    """sha256 of the reward model, None where the reward reads none. UserError if the run was started with another."""
    sha256, noted = reward_sha256(experiment.reward), directory / REWARD_FILE
    if noted.exists() and noted.read_text().strip() != sha256:
        raise UserError(
            f"{directory} was started with another reward model than reward.path holds now ({experiment.reward.path}): "
            "give the folder of that one, or choose another --run-dir"
        )
    return sha256


def read_stages(directory: Path) -> dict[str, dict[str, Any]]:
    """The completed stages of the run in ``directory``. UserError if the file is damaged."""
    path = directory / STAGES_FILE
    try:
        stages = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise UserError(f"{path} is damaged ({error}); delete it, and --resume repeats the stages of the run") from None
    if not isinstance(stages, dict) or not all(isinstance(stage, dict) for stage in stages.values()):
        raise UserError(f"{path} does not hold stages by name; delete it, and --resume repeats the stages of the run")
    return stages


def is_run(folder: Path) -> bool:
    """Whether this is the folder of a run: CONFIG_FILE alone may be of anything."""
    return (folder / CONFIG_FILE).is_file() and (folder / COMMAND_FILE).is_file()


def run_of(path: Path) -> Path | None:
    """The innermost folder of a run that is ``path`` or holds it, None where there is none."""
    path = path.resolve()
    return next((folder for folder in (path, *path.parents) if is_run(folder)), None)


def locate(path: Path) -> tuple[Path, Path]:
    """(run folder, bundle) of a run or a bundle inside one. UserError if there is neither."""
    if (path / CONFIG_FILE).exists():
        for bundle in (path / "bundle", path / "residual", path / "imitation" / "bundle"):
            if bundle.exists():
                return path, bundle
        raise UserError(f"{path} has no bundle yet; go on with: vla-rl train ... --run-dir {path} --resume")
    if (run := run_of(path)) is not None:
        return run, path
    if not path.exists():
        raise UserError(f"{path} does not exist; it should be a run folder or a bundle")
    if (path / MANIFEST).exists():
        raise UserError(f"{path} is a bundle outside of a run: give --sim CONFIG, where it is to be evaluated")
    raise UserError(f"{path} is neither a run folder nor a bundle inside one; for any other bundle give --sim CONFIG")


def bundle_of(path: Path) -> Path:
    """Of a run, or ``path`` where that is a bundle. UserError as of ``locate``."""
    return path if (path / MANIFEST).exists() else locate(path)[1]


def experiment_of(directory: Path) -> Experiment:
    """The resolved configuration of a run's folder."""
    if not (directory / CONFIG_FILE).exists():
        why = f"it has no {CONFIG_FILE}" if directory.is_dir() else "there is no such folder"
        raise UserError(f"{directory} is not the folder of a run: {why}")
    return load_config(Experiment, directory / CONFIG_FILE)


def git_revision() -> str | None:
    """Commit of the checkout that this program runs from; None if it was installed from a package, or without git."""
    here = Path(__file__).resolve()
    git = shutil.which("git")
    if git is None:
        return None
    # Where it is installed may lie in the checkout of another project, which does not track this file.
    for question in (["ls-files", "--error-unmatch", here.name], ["rev-parse", "HEAD"]):
        command = [git, "-C", str(here.parent), *question]
        answer = subprocess.run(command, capture_output=True, text=True, check=False)
        if answer.returncode != 0:
            return None
    return answer.stdout.strip()
