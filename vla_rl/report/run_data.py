"""The contents of a run's folder, for the report."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sims.config.yaml_tree import YamlError, read_tree
from sims.errors import UserError
from vla_rl.runs.failures import read_failures
from vla_rl.runs.metrics import count_iterations, read_metrics
from vla_rl.runs.result import read_result, with_episodes
from vla_rl.runs.run_dir import read_stages

Points = list[tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A success rate and its 95 % interval, all in [0, 1]."""

    success: float
    low: float
    high: float
    episodes: int | None = None

    @staticmethod
    def of(row: Mapping[str, Any]) -> Rate:
        low, high = row["interval"]
        return Rate(success=row["success"], low=low, high=high, episodes=row.get("episodes"))


@dataclass(frozen=True, kw_only=True)
class Round:
    """Of a run in imagination. ``stages``: results so far, by name without the round's number."""

    stages: Mapping[str, Mapping[str, Any]]
    metrics: Sequence[Mapping[str, Any]]
    videos: Mapping[str, Path]


@dataclass(frozen=True, kw_only=True)
class RunData:
    """``settings``: the configuration as dotted keys. ``metrics``: one record per iteration in the simulator.
    ``iterations``: recorded so far, in imagination too.

    ``failures``: simulator processes that were replaced. ``result``: result.json, empty until the run is complete.
    """

    name: str
    path: Path
    config_text: str
    settings: Mapping[str, Any]
    metrics: Sequence[Mapping[str, Any]]
    iterations: int
    imitation: Sequence[Mapping[str, Any]]
    result: Mapping[str, Any]
    command: str
    videos: Mapping[str, Path]
    failures: Sequence[Mapping[str, Any]] = ()
    rounds: Sequence[Round] = ()

    @property
    def before(self) -> Rate | None:
        return Rate.of(self.result["bc"]) if "bc" in self.result else None

    @property
    def after(self) -> Rate | None:
        return Rate.of(self.result["rl"]) if "rl" in self.result else None

    @property
    def imagined(self) -> dict[str, Rate]:
        """Before and after, of a run without a simulator; empty for every other, and until it is complete."""
        return {name: Rate.of(row) for name, row in self.result.get("imagined", {}).items()}

    @property
    def compared(self) -> tuple[Rate | None, Rate | None]:
        """Before and after, as ``compare`` shows them: ``imagined`` where there is no simulator."""
        return self.before or self.imagined.get("before"), self.after or self.imagined.get("after")

    @property
    def stage_s(self) -> dict[str, float]:
        """Wall time of every stage that took some; empty until the run is complete."""
        return {name: value for name, value in self.result.get("wall_s", {}).items() if value}

    @property
    def wall_s(self) -> float:
        """Of all stages; 0 until the run is complete."""
        return sum(self.stage_s.values())

    def points(self, name: str) -> Points:
        """(iteration, value) wherever ``name`` was recorded and finite."""
        return series(self.metrics, name)

    def names(self) -> list[str]:
        """Every metric recorded, in order of first appearance."""
        return list(dict.fromkeys(name for record in self.metrics for name in record if name not in INDEX))


INDEX = ("iteration", "wall_s")


def series(records: Sequence[Mapping[str, Any]], name: str) -> Points:
    return [(record["iteration"], record[name]) for record in records if record.get(name) is not None]


def read_run(path: Path) -> RunData:
    """Raises UserError if ``path`` is not the folder of a run, or where a file in it is damaged."""
    if not (path / "config.yaml").is_file() and not (path / "metrics.jsonl").is_file():
        why = "it has neither config.yaml nor metrics.jsonl" if path.is_dir() else "there is no such folder"
        raise UserError(f"{path} is not the folder of a run: {why}")
    return RunData(
        name=path.resolve().name,
        path=path,
        config_text=_text(path / "config.yaml"),
        settings=_settings(path / "config.yaml"),
        metrics=read_metrics(path),
        iterations=count_iterations(path),
        imitation=read_metrics(path / "imitation"),
        result=read_result(path),
        command=_text(path / "command.txt").strip(),
        videos=_videos(path / "videos"),
        failures=read_failures(path),
        rounds=_rounds(path, read_stages(path)),
    )


def _settings(path: Path) -> dict[str, Any]:
    try:
        return dict(_leaves(read_tree(path)[0], "")) if path.is_file() else {}
    except YamlError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _rounds(path: Path, stages: Mapping[str, Mapping[str, Any]]) -> list[Round]:
    rounds = []
    numbers = {name.rpartition("_")[2] for name in stages if name.startswith(("record_", "fit_"))}
    for number in range(len(numbers)):
        folder, ending = path / "imagination" / f"round_{number}", f"_{number}"
        rounds.append(
            Round(
                stages={name.removesuffix(ending): one for name, one in stages.items() if name.endswith(ending)},
                metrics=read_metrics(folder),
                videos=_videos(folder / "videos"),
            )
        )
    return rounds


def per_task(run: RunData, key: str) -> dict[str, Rate]:
    """Of the stage ``key`` of result.json, the tasks that it has episodes of."""
    rows = with_episodes(run.result.get(key, {}).get("per_task", {}))
    return {task: Rate.of(row) for task, row in rows.items()}


def difference(before: Rate, after: Rate) -> tuple[float, float, float]:
    """after - before and its 95 % interval, from the two Wilson intervals (Newcombe 1998, method 10)."""
    gain = after.success - before.success
    low = gain - math.hypot(after.success - after.low, before.high - before.success)
    high = gain + math.hypot(after.high - after.success, before.success - before.low)
    return gain, low, high


def _videos(folder: Path) -> dict[str, Path]:
    return {video.stem: video for video in sorted(folder.glob("*.mp4"))}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is damaged: {error}") from None


def _leaves(tree: Any, prefix: str) -> list[tuple[str, Any]]:
    if not isinstance(tree, dict):
        return [(prefix, tree)]
    return [leaf for key, node in tree.items() for leaf in _leaves(node, f"{prefix}.{key}" if prefix else str(key))]
