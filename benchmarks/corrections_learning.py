"""What a policy learns from corrections, beside as many further demonstrations (``benchmarks.corrections learning``).

Of each task and seed: a policy is cloned from few demonstrations by a demonstrator who errs as people do. A scripted
operator then watches it over the page's own connection, takes over when it needs help, and finishes the task, until
there are enough corrected episodes that succeed. Each recipe (a packaged configuration of ``vla-rl learn``) learns from
these episodes. For comparison the same number of further demonstrations, by an expert without errors, is learned from
in the place of the corrections: the same shares of a batch, the same number of updates. Success is on the same held-out
starts, without a person.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.kept import keep_options
from benchmarks.learning import mean_row
from episodes.files import write_json
from episodes.schema import HUMAN
from episodes.store import EpisodeStore
from real_robot.corrections.settings import ControlSettings
from tests.corrections.scripted_operator import ScriptedOperator, TakeOverAfter
from vla_rl.api import load_experiment
from vla_rl.bench.record import Row, row
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.config.loader import load_config
from vla_rl.config.packaged import find_config
from vla_rl.runners.correction_rounds import learn_round
from vla_rl.runners.corrections import BUNDLE, EPISODES, serving
from vla_rl.runners.demonstrations import collect
from vla_rl.runners.evaluate import evaluate_path
from vla_rl.runners.imitation import CloningSource, clone, new_policy, recorded_robot
from vla_rl.runs.run_dir import experiment_device

# Demonstrations and updates after which the cloned policy succeeds in about 30 to 50 of 100 episodes.
START = {"pick": (10, 300), "open_drawer": (6, 200), "reach": (5, 150)}
UNITS = {
    "episodes watched": "1",
    "steps of a person": "1",
    "time of correcting": "s",
    "processor time of correcting": "s",
}
DEMONSTRATIONS = "demonstrations"
PROGRAM = ControlSettings(show_expert=True, wait_for_input=True, pace=1000.0, image_size=64, lost_person_s=10.0)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """``recipes``: packaged configurations of ``vla-rl learn``. ``take_over_after``: steps without success after which
    the operator intervenes. ``held_out``: episodes of each evaluation. ``finished``: rows of the tasks and
    seeds whose figures are in the folder, without running anything."""

    tasks: Sequence[str] = tuple(START)
    seeds: Sequence[int] = (0, 1, 2)
    recipes: Sequence[str] = ("hg_dagger",)
    corrections: int = 30
    take_over_after: int = 25
    held_out: int = 100
    finished: bool = False

    @property
    def of_results(self) -> dict[str, Any]:
        """What the results of a task and seed depend on; of the recipes only the first, by which demonstrations are
        learned from and the page is served, since every recipe has a result of its own."""
        return {
            "corrections": self.corrections,
            "take_over_after": self.take_over_after,
            "held_out": self.held_out,
            "recipe": self.recipes[0],
        }


def compare(settings: Settings, work: Path) -> list[Row]:
    """Rows of each task, and of all where every task has every seed. What lies in ``work`` is not done again.

    UserError where that is of other settings.
    """
    runs = [
        Comparison(task, seed, settings, work / f"{task}-{seed}") for task in settings.tasks for seed in settings.seeds
    ]
    done = [run for run in runs if run.finished] if settings.finished else runs
    figures = [{"seed": run.seed, "task": run.task, **run.figures()} for run in done]
    rows: list[Row] = []
    for name in [name for name in figures[0] if name not in ("seed", "task")]:
        if len(done) == len(runs):
            rows.append(_mean(name, [_pooled(name, seed, figures) for seed in settings.seeds]))
        for task in dict.fromkeys(one["task"] for one in figures):
            of_task = [{"seed": one["seed"], "value": one[name]} for one in figures if one["task"] == task]
            rows.append(_mean(f"{name}, {task}", of_task))
    return rows


def _pooled(name: str, seed: int, figures: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one seed, the mean over tasks."""
    values = [one[name] for one in figures if one["seed"] == seed]
    if not isinstance(values[0], dict):
        return {"seed": seed, "value": float(np.mean(values))}
    success, episodes = [one["success"] for one in values], [one["episodes"] for one in values]
    return {"seed": seed, "value": {"success": float(np.mean(success)), "episodes": sum(episodes)}}


def _mean(name: str, runs: Sequence[dict[str, Any]]) -> Row:
    if isinstance(runs[0]["value"], dict):
        return mean_row(name, runs, "value")
    values = [one["value"] for one in runs]
    return row(
        name,
        round(float(np.mean(values)), 1),
        UNITS[name.partition(",")[0]],
        seeds=[one["seed"] for one in runs],
        values=values,
    )


@dataclass(frozen=True)
class Comparison:
    """One task and seed, in a folder of its own."""

    task: str
    seed: int
    settings: Settings
    folder: Path

    @cached_property
    def experiment(self) -> Experiment:
        episodes, steps = START[self.task]
        return load_experiment(
            "quickstart",
            f"--seed={self.seed}",
            f"--sim.tasks=[{self.task}]",
            f"--start.episodes={episodes}",
            f"--start.bc.steps={steps}",
            "--start.bc.batch_size=64",
            "--sim.acceleration_limits=false",
            "--sim.action_delay=0",
        )

    @property
    def _imitation(self) -> Imitation:
        start = self.experiment.start
        assert isinstance(start, Imitation)
        return start

    @property
    def finished(self) -> bool:
        names = (*self.settings.recipes, DEMONSTRATIONS)
        return all((self.folder / f"success after {name}.json").exists() for name in names)

    def figures(self) -> dict[str, Any]:
        """Of every row: a summary of successes, or a number. UserError where the folder has some of other settings."""
        keep_options(self.folder, self.settings.of_results)
        start = self._once("start", self._clone)
        before = self._success("start", start / BUNDLE)
        corrected = self._once("corrected", lambda folder: self._correct(start / BUNDLE, folder))
        demonstrated = self._once("demonstrated", lambda folder: self._demonstrate(start / BUNDLE, folder))
        first, *others = self.settings.recipes
        config = self._config(first)
        demonstrations = replace(config, learning=replace(config.learning, actors=("expert",)))
        more = self._learned(DEMONSTRATIONS, demonstrated, demonstrations)
        after = {recipe: self._learned(recipe, corrected, self._config(recipe)) for recipe in self.settings.recipes}
        return {
            "success before": before,
            "success after": after[first],
            "success with as many demonstrations": more,
            **{f"success after, {recipe}": after[recipe] for recipe in others},
            **json.loads((corrected / "figures.json").read_text()),
        }

    def _clone(self, folder: Path) -> None:
        start = self._imitation
        collect(self.experiment, episodes=start.episodes, out=folder / EPISODES)
        device = experiment_device(self.experiment)
        policy = new_policy(start, recorded_robot(folder / EPISODES), seed=self.seed, device=device)
        clone(policy, [CloningSource(store=folder / EPISODES)], start.bc, folder, seed=self.seed, fit_normalizer=True)

    def _correct(self, bundle: Path, folder: Path) -> None:
        done: list[dict[str, Any]] = []
        started = time.monotonic(), time.process_time()
        with (
            serving(bundle, self._config(self.settings.recipes[0]), folder, experiment=self.experiment) as server,
            ScriptedOperator(server.invite("script"), TakeOverAfter(steps=self.settings.take_over_after)) as operator,
        ):
            while sum(one["corrected"] and one["success"] for one in done) < self.settings.corrections:
                done += operator.correct(1)
        with EpisodeStore(folder / EPISODES) as store:
            human = [int((store.map(entry)["actor"] == HUMAN).sum()) for entry in store.select()]
        figures = {
            "episodes watched": len(done),
            "steps of a person": sum(human),
            "time of correcting": round(time.monotonic() - started[0], 1),
            "processor time of correcting": round(time.process_time() - started[1], 1),
        }
        write_json(folder / "figures.json", figures)

    def _demonstrate(self, bundle: Path, folder: Path) -> None:
        shutil.copytree(bundle, folder / BUNDLE)
        perfect = replace(self._imitation, noise=0.0, observe_every=1)
        experiment = replace(self.experiment, seed=10_000 + self.seed, start=perfect)
        collect(experiment, episodes=self.settings.corrections, out=folder / EPISODES)

    def _learned(self, name: str, source: Path, config: CorrectionsConfig) -> dict[str, Any]:
        """Success of ``source``'s policy after a round of learning."""

        def learn(folder: Path) -> None:
            shutil.copytree(source, folder)
            learn_round(folder, config)

        return self._success(f"after {name}", self._once(f"after {name}", learn) / BUNDLE)

    def _config(self, recipe: str) -> CorrectionsConfig:
        shipped = load_config(CorrectionsConfig, find_config(Path(recipe), "corrections"))
        learning = replace(shipped.learning, demonstrations=(self.folder / "start" / EPISODES,))
        if (
            learning.residual is None and learning.off_policy is None
        ):  # the encoder stays, as where the policy was cloned
            learning = replace(learning, bc=replace(learning.bc, frozen=("encoder",)))
        return replace(shipped, seed=self.seed, control=PROGRAM, learning=learning)

    def _success(self, name: str, bundle: Path) -> dict[str, Any]:
        """On the same held-out starts, whatever the seed of the learning."""
        path, episodes = self.folder / f"success {name}.json", self.settings.held_out
        if not path.exists():
            write_json(path, evaluate_path(bundle, episodes=episodes, split=None, seed=0, experiment=self.experiment))
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def _once(self, name: str, make: Callable[[Path], None]) -> Path:
        """The folder ``name``, made whole or not at all."""
        path, part = self.folder / name, self.folder / f"{name}.part"
        if not path.exists():
            shutil.rmtree(part, ignore_errors=True)
            make(part)
            part.rename(path)
        return path
