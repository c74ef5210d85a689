"""Runs that differ in their seed alone, taken together: interquartile means with intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from vla_rl.intervals import interquartile_interval, interquartile_mean
from vla_rl.report.compute import ComputeFit, compute_fit
from vla_rl.report.run_data import Rate, RunData

OF_ONE_RUN = ("seed", "evaluation.seed", "cluster", "trace", "watchdog_s", "device", "wandb")


@dataclass(frozen=True, kw_only=True)
class Group:
    """``name``: the settings in which it differs from the other groups. ``rate``: interquartile mean over runs and
    tasks of the final success, with its interval over runs; None where no run is complete. ``compute``: success as a
    function of control steps; None where there are too few validations."""

    name: str
    runs: Sequence[RunData]
    rate: Rate | None
    compute: ComputeFit | None


def groups(runs: Sequence[RunData]) -> list[Group]:
    """In the order of their first run."""
    settings = [_settings(run) for run in runs]
    different = [key for key in dict.fromkeys(key for one in settings for key in one) if _varies(key, settings)]
    members: dict[str, list[RunData]] = {}
    for run, one in zip(runs, settings, strict=True):
        name = ", ".join(f"{key} {one.get(key, 'not set')}" for key in different)
        members.setdefault(name or "all runs", []).append(run)
    return [
        Group(name=name, runs=those, rate=_rate(those), compute=compute_fit(those)) for name, those in members.items()
    ]


def _settings(run: RunData) -> dict[str, object]:
    return {
        key: value
        for key, value in run.settings.items()
        if key not in OF_ONE_RUN and not key.startswith("cluster.") and value is not None
    }


def _varies(key: str, settings: Sequence[Mapping[str, object]]) -> bool:
    return len({repr(one.get(key)) for one in settings}) > 1


def _rate(runs: Sequence[RunData]) -> Rate | None:
    """Of the runs that are complete; each has a score per task, or one for all where tasks are not told apart."""
    results = [run.result["rl"] for run in runs if "rl" in run.result]
    if not results:
        return None
    tasks = list(results[0].get("per_task", {}))
    rows = [[row["per_task"][task]["success"] for task in tasks] if tasks else [row["success"]] for row in results]
    scores = np.array(rows)
    low, high = interquartile_interval(scores)
    return Rate(success=interquartile_mean(scores), low=low, high=high)
