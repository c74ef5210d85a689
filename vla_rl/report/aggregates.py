"""Runs that differ in their seed alone, taken together: interquartile means with intervals."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sims.numbers.statistics import interquartile_interval, interquartile_mean
from vla_rl.report.compute import ComputeFit, compute_fit
from vla_rl.report.run_data import Rate, RunData, per_task
from vla_rl.runs.changes import WITHOUT_EFFECT, among
from vla_rl.runs.result import RESULT_FILE

NUMBER = re.compile(r"(\d+)")
SHOWN = 6  # settings in a group's name
OF_ONE_RUN = (
    *("seed", "evaluation.seed", "evaluation.videos_per_task", "evaluation.control_episodes"),
    *WITHOUT_EFFECT,
)


@dataclass(frozen=True, kw_only=True)
class Group:
    """``name``: settings in which it differs from the other groups, ``SHOWN`` at most, and which runs were taken of
    seeds that several have. ``runs``: one of each seed. ``rate``: interquartile mean over runs and tasks of the final
    success, with its interval over runs; None where fewer than two are complete. ``compute``: success as a function of
    control steps; None where there are too few validations."""

    name: str
    runs: Sequence[RunData]
    rate: Rate | None
    compute: ComputeFit | None

    @property
    def imagined(self) -> bool:
        """Whether the success is that of imagined episodes: the runs have no simulator."""
        return any(run.imagined for run in self.runs)


def groups(runs: Sequence[RunData]) -> list[Group]:
    """In the order of their first run."""
    settings = _settings(runs)
    different = [key for key in dict.fromkeys(key for one in settings for key in one) if _varies(key, settings)]
    members: dict[tuple[str, ...], list[RunData]] = {}
    for run, one in zip(runs, settings, strict=True):
        members.setdefault(tuple(repr(one.get(key)) for key in different), []).append(run)
    names = _names([settings[runs.index(those[0])] for those in members.values()], different)
    found = []
    for name, those in zip(names, members.values(), strict=True):
        title = name if names.count(name) == 1 else f"{those[0].name}: {name}"
        taken, note = _one_of_each_seed(those)
        found.append(Group(name=title + note, runs=taken, rate=_rate(taken), compute=compute_fit(taken)))
    return found


def _one_of_each_seed(runs: Sequence[RunData]) -> tuple[list[RunData], str]:
    """The run of each seed that was completed last, and a note on the seeds that several runs have.

    Such runs are copies or repetitions: as many independent runs they would make an interval too narrow.
    """
    of_seed: dict[object, list[RunData]] = {}
    for run in runs:
        of_seed.setdefault(run.settings.get("seed", run.path), []).append(run)
    taken = [max(those, key=_completed_ns) for those in of_seed.values()]
    notes = [
        f"; of {len(those)} runs with seed {seed} the newest: {run.path}"
        for (seed, those), run in zip(of_seed.items(), taken, strict=True)
        if len(those) > 1
    ]
    return taken, "".join(notes)


def _completed_ns(run: RunData) -> int:
    """When it was, 0 where it is not complete."""
    path = run.path / RESULT_FILE
    return path.stat().st_mtime_ns if path.exists() else 0


def _names(settings: Sequence[Mapping[str, object]], different: Sequence[str]) -> list[str]:
    """Of each group. Where more than ``SHOWN`` settings differ: which algorithm, simulator and so on it is, then what
    all groups have set, since the rest are settings of another kind of algorithm."""
    shown, hidden = different, ""
    if len(different) > SHOWN:
        kinds = [key for key in different if key.endswith(".name")]
        common = [key for key in different if key not in kinds and all(key in one for one in settings)]
        shown = [*kinds, *common][:SHOWN]
        hidden = f", and {len(different) - len(shown)} more settings"
    labels = [", ".join(f"{key} {one.get(key, 'not set')}" for key in shown) + hidden for one in settings]
    return [label.removeprefix(", ") or "all runs" for label in labels]


def _settings(runs: Sequence[RunData]) -> list[dict[str, object]]:
    """Of each run, without what is of it alone: also its own seed in a path, as each starts from the bundle of its
    seed. That is a number which in all paths that are alike but for their numbers is the run's seed."""
    settings = [
        {key: value for key, value in run.settings.items() if not among(key, OF_ONE_RUN) and value is not None}
        for run in runs
    ]
    alike: dict[tuple[str, str], list[int]] = {}
    for i, one in enumerate(settings):
        for key, value in one.items():
            if isinstance(value, str) and "/" in value:
                alike.setdefault((key, NUMBER.sub("", value)), []).append(i)
    for (key, _), members in alike.items():
        seeds = tuple(str(runs[i].settings.get("seed")) for i in members)
        parts = zip(*(NUMBER.split(str(settings[i][key])) for i in members), strict=True)
        common = [["SEED"] * len(seeds) if part == seeds and len(set(seeds)) > 1 else part for part in parts]
        for i, path in zip(members, zip(*common, strict=True), strict=True):
            settings[i][key] = "".join(path)
    return settings


def _varies(key: str, settings: Sequence[Mapping[str, object]]) -> bool:
    return len({repr(one.get(key)) for one in settings}) > 1


def _rate(runs: Sequence[RunData]) -> Rate | None:
    """Of the runs that are complete, and of what is compared of them; each has a score per task, or one for all where
    tasks are not told apart.

    Tasks that a run has no episodes of are left out. None for one run: it says nothing of others.
    """
    compared = [(run.compared[1], per_task(run, "rl")) for run in runs]
    complete = [(after.success, rates) for after, rates in compared if after is not None]
    if len(complete) < 2:
        return None
    tasks = [task for task in complete[0][1] if all(task in rates for _, rates in complete)]
    rows = [[rates[task].success for task in tasks] if tasks else [success] for success, rates in complete]
    scores = np.array(rows)
    low, high = interquartile_interval(scores)
    return Rate(success=interquartile_mean(scores), low=low, high=high)
