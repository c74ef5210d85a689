"""``vla-rl sweep``: trials of settings, each of one run per seed in a folder of its own, chosen by their validation."""

from __future__ import annotations

import gc
import shlex
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from episodes.files import write_json
from sims.errors import RunFailure, UserError, is_disk_full
from sims.vector_env import EnvSpec
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import flat_settings, load_config, save_config
from vla_rl.config.merge import absolute
from vla_rl.report import write_report, write_sweep_page
from vla_rl.runners.checks import check_experiment
from vla_rl.runners.train import learn, opened
from vla_rl.runs.changes import WITHOUT_EFFECT, among, refuse_changes
from vla_rl.runs.metrics import read_metrics
from vla_rl.runs.progress import console
from vla_rl.runs.run_dir import COMMAND_FILE, CONFIG_FILE, SWEEP_FILE, lock_folder, read_stages, stage_seconds
from vla_rl.sweep.config import Range, SweepConfig
from vla_rl.sweep.space import Settings, Space, short, shown
from vla_rl.sweep.study import STUDY_FILE, Pruned, Trials, check_optuna, open_trials

EXPERIMENT_FILE, RESULT_FILE, PAGE = "experiment.yaml", "sweep.json", "sweep.html"
MAY_CHANGE = ("trials", "budget_hours", *WITHOUT_EFFECT)


def sweep(space: Space, folder: Path, *, resume: bool, command: str) -> dict[str, Any]:
    """All trials; returns what sweep.json holds. Trials that ended are not repeated on ``resume``.

    Everything is checked before the folder is made. Raises RunFailure if no trial was completed.
    """
    check_optuna()
    base = check_sweep(space)
    check_folder(folder, space, base, resume=resume)
    with lock_folder(folder):
        save_config(base, folder / EXPERIMENT_FILE)
        save_config(space.config, folder / SWEEP_FILE)  # last: where it is, --resume goes on
        (folder / COMMAND_FILE).write_text(command + "\n")
        with open_trials(folder, space.config, base) as trials:
            result = Sweep(space, folder, trials, command).run()
    if result["best"] is None:
        reasons = [trial["message"] for trial in result["trials"] if trial["message"]]
        raise RunFailure(f"no trial was completed; the first: {reasons[0] if reasons else 'no budget'}")
    return result


@dataclass(frozen=True)
class Sweep:
    """One that is going on."""

    space: Space
    folder: Path
    trials: Trials
    command: str

    def run(self) -> dict[str, Any]:
        config = self.space.config
        interrupted = self.trials.unfinished()
        if interrupted is not None:
            self._trial(interrupted)
        while len(self.trials) < config.trials and not self._spent():
            number = self.trials.begin()
            if number is None:
                _say(f"all {len(self.trials)} combinations of the settings were tried")
                break
            self._trial(number)
        return self.write()

    def _spent(self) -> bool:
        hours = sum(seconds(run) for run in self.folder.glob("trial_*/seed_*")) / 3600
        spent = self.space.config.budget_hours is not None and hours >= self.space.config.budget_hours
        if spent:
            _say(f"the budget of {self.space.config.budget_hours:g} h is spent")
        return spent

    def _trial(self, number: int) -> None:
        settings = self.trials.settings(number)
        _say(f"trial {number} ({number + 1} of {self.space.config.trials}): {shown(settings)}")
        try:
            value = self._value(number, settings)
        except Pruned as reason:
            self.trials.end(number, "pruned", message=str(reason))
        except Exception as error:
            if is_disk_full(error):
                raise  # of every trial; this one goes on with --resume
            self._note_failure(number, error)
        else:
            self.trials.end(number, "complete", value=value)
        gc.collect()
        record = self.write()["trials"]
        this = next(trial for trial in record if trial["trial"] == number)
        value_shown = "" if this["value"] is None else f" {short(this['value'])}"
        _say(f"trial {number}: {this['state']}{value_shown}" + f": {this['message']}" * bool(this["message"]))

    def _note_failure(self, number: int, error: Exception) -> None:
        expected = isinstance(error, UserError | RunFailure)
        if not expected:
            runs = sorted(self._trial_folder(number).glob("seed_*"), key=lambda run: run.stat().st_mtime)
            log = (runs[-1] if runs else self.folder) / "traceback.txt"
            log.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
        self.trials.end(number, "failed", message=str(error) if expected else f"{type(error).__name__}: {error}")

    def _value(self, number: int, settings: Settings) -> float:
        """The mean objective of a run per seed."""
        config = self.space.config
        finals: list[float] = []
        before: list[float] = []
        for seed in config.seeds:
            run_dir = self._trial_folder(number) / f"seed_{seed}"
            report = partial(self._report, number, run_dir, before, finals)
            self._run(run_dir, settings, seed, report)
            curve = objective_curve(run_dir, config.objective)
            before += _running_means(finals, curve)
            finals.append(statistics.fmean(curve[-config.final_validations :]))
        return statistics.fmean(finals)

    def _run(self, run_dir: Path, settings: Settings, seed: int, report: Callable[[], None]) -> None:
        experiment = self.space.experiment(settings, seed)
        words = ["vla-rl", "train", str(self.space.file), *self.space.tokens(settings, seed), "--run-dir", str(run_dir)]
        report()
        if "reinforce" in read_stages(run_dir):
            return
        resume = (run_dir / CONFIG_FILE).exists()
        with opened(experiment, run_dir, resume=resume, command=shlex.join(words)) as (run, env):
            try:
                learn(run, env, recorded=report)
            finally:
                write_report(run_dir)

    def _report(self, number: int, run_dir: Path, before: Sequence[float], finals: Sequence[float]) -> None:
        curve = objective_curve(run_dir, self.space.config.objective)
        self.trials.report(number, [*before, *_running_means(finals, curve)])

    def _trial_folder(self, number: int) -> Path:
        return self.folder / f"trial_{number:03d}"

    def write(self) -> dict[str, Any]:
        """sweep.json and sweep.html of the trials so far."""
        rows = [self._with_runs(record) for record in self.trials.records()]
        rows.sort(key=lambda row: (row["state"] != "complete", -(row["value"] or 0.0), row["trial"]))
        complete = [row["trial"] for row in rows if row["state"] == "complete"]
        result = {
            "sweep": str(self.folder),
            "objective": self.space.config.objective,
            "settings": self.space.plain_settings(),
            "best": complete[0] if complete else None,
            "trials": rows,
            "page": str(self.folder / PAGE),
            "command": self.command,
        }
        write_json(self.folder / RESULT_FILE, result)
        write_sweep_page(result, self.folder / PAGE)
        return result

    def _with_runs(self, record: Mapping[str, Any]) -> dict[str, Any]:
        runs = sorted(self._trial_folder(record["trial"]).glob("seed_*"))
        paths = [str(run.relative_to(self.folder)) for run in runs]
        return {**record, "runs": paths, "seconds": round(sum(map(seconds, runs)), 2)}


def _say(line: str) -> None:
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def objective_curve(run_dir: Path, objective: str) -> list[float]:
    """A value per validation so far."""
    return [record[objective] for record in read_metrics(run_dir) if record.get(objective) is not None]


def seconds(run_dir: Path) -> float:
    """That a run took so far without its evaluations, over all its processes."""
    return stage_seconds(run_dir, "imitate") + stage_seconds(run_dir, "reinforce")


def _running_means(finals: Sequence[float], curve: Sequence[float]) -> list[float]:
    """Over the seeds that are done and the one under way."""
    return [statistics.fmean([*finals, value]) for value in curve]


# -- before anything runs -------------------------------------------------------------------------------------------


def check_sweep(space: Space) -> Experiment:
    """One experiment of the sweep, with the first of all values. Raises UserError that names what is wrong."""
    space.check()
    examples = [space.experiment(settings, space.config.seeds[0]) for settings in space.each_value()]
    for experiment in examples:
        env = make_env(experiment.sim)
        try:
            check_experiment(experiment, env)
            _check_objective(space.config, experiment, env.spec)
        finally:
            env.close()
    return examples[0]


def _check_objective(config: SweepConfig, experiment: Experiment, spec: EnvSpec) -> None:
    names = ["validation", "validation_low", *(f"validation/{task}" for task in spec.tasks)]
    if config.objective not in names:
        raise UserError(
            f"objective must be one of {', '.join(names)}, got {config.objective!r}: of the validation starts, because "
            "the held-out starts of the final evaluation are not for tuning"
        )
    if experiment.imagination is not None:
        raise UserError("a sweep needs imagination null: a run in a world model has no validation curve")
    evaluation, iterations = experiment.evaluation, experiment.algorithm.iterations
    times = iterations // evaluation.validate_every if evaluation.validates else 0
    if times < config.final_validations:
        raise UserError(
            f"a run is validated {times} times (evaluation.validate_every {evaluation.validate_every}, "
            f"validation_episodes {evaluation.validation_episodes}, algorithm.iterations {iterations}), "
            f"which must be at least final_validations ({config.final_validations})"
        )
    task = config.objective.partition("/")[2]
    if task in spec.tasks and (place := spec.tasks.index(task)) >= evaluation.validation_episodes:
        raise UserError(
            f"objective {config.objective}: tasks are validated in turn, and there is no episode of {task}; set "
            f"evaluation.validation_episodes to at least {place + 1}, got {evaluation.validation_episodes}"
        )


def check_folder(folder: Path, space: Space, base: Experiment, *, resume: bool) -> None:
    """UserError where the folder holds what a sweep must not continue, or what ``resume`` cannot."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; choose another --run-dir")
    if not (folder / SWEEP_FILE).exists():
        if resume:
            raise UserError(f"{folder} holds no sweep to resume; leave --resume out to start one")
        if (folder / STUDY_FILE).exists() or (folder / CONFIG_FILE).exists():
            raise UserError(f"{folder} holds something else; choose another --run-dir")
        return
    if not resume:
        raise UserError(f"{folder} already holds a sweep; add --resume to continue, or choose another --run-dir")
    started = load_config(SweepConfig, folder / SWEEP_FILE), load_config(Experiment, folder / EXPERIMENT_FILE)
    for before, after in zip(started, (space.config, base), strict=True):
        refuse_changes(
            flat_settings(before),
            flat_settings(after),
            where=str(folder),
            may_change=lambda key: among(key, MAY_CHANGE),
            named=", ".join(MAY_CHANGE),
        )


def load_space(file: Path, overrides: Sequence[str], sweep_file: Path) -> Space:
    """Of the files on the command line; relative paths among the choices are of ``sweep_file``'s folder.

    Raises ConfigError.
    """
    config = load_config(SweepConfig, sweep_file)
    settings = {
        name: values
        if isinstance(values, Range)
        else tuple(absolute(Experiment, value, sweep_file.parent, (name,)) for value in values)
        for name, values in config.settings.items()
    }
    return Space(file=file, overrides=overrides, config=replace(config, settings=settings))
