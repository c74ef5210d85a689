"""Results on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from vla_rl.report.aggregates import groups
from vla_rl.report.comparison import unique_names
from vla_rl.report.pieces import duration, short_names
from vla_rl.report.run_data import Rate, RunData, difference, read_run
from vla_rl.runs.listing import RunSummary

FILE_WIDTH = 10_000  # characters


def for_stdout() -> Console:
    """Of standard output; in a file or a pipe, which has no width, every row of a table stays one line."""
    console = Console()
    return console if console.is_terminal or console.is_jupyter else Console(width=FILE_WIDTH)


def print_evaluation(result: Mapping[str, Any]) -> None:
    """``result`` as ``vla-rl eval --json`` prints it: overall, per task, and the exploring policy."""
    table = Table("task", "success", "95 % interval", "episodes", box=None, pad_edge=False)
    rows = {**result["per_task"], "all": {**result, "episodes": result["episodes"]}}
    if "stochastic" in result:
        rows["all, exploring"] = result["stochastic"]
    for name, row in rows.items():
        rate = Rate.of(row)
        episodes = "" if rate.episodes is None else str(rate.episodes)
        table.add_row(escape(name), _percent(rate.success), _interval(rate), episodes)
    console = for_stdout()
    console.print(table)
    if "score_table" in result:
        console.print("", result["score_table"], sep="\n", highlight=False, markup=False)


def print_runs(runs: Sequence[RunSummary]) -> None:
    """One line per run, then what is damaged."""
    columns = ("state", "stage", "iterations", "success", "last written", "MB")
    table = Table(Column("run", overflow="fold"), *columns, box=None, pad_edge=False)
    for run in runs:
        success = "" if run.success is None else _percent(run.success)
        if success and run.state != "finished":
            success += " (validation)"
        cells = (escape(run.path), run.state, run.stage, str(run.iterations), success)
        table.add_row(*cells, f"{duration(run.age_s)} ago", f"{run.bytes / 1e6:.1f}")
    console = for_stdout()
    console.print(table)
    for damage in (run.damage for run in runs if run.damage):
        console.print(damage, highlight=False, markup=False, soft_wrap=True)


def success_line(result: Mapping[str, Any]) -> str:
    """What a run achieved, from its result.json: the deployed policy on the held-out starts."""
    if "imagined" in result:
        return _imagined_line(result)
    before, after = Rate.of(result["bc"]), Rate.of(result["rl"])
    return (
        f"success {_percent(after.success)} ({_interval(after)}), before reinforcement {_percent(before.success)} "
        f"({_interval(before)}), {result['episodes']} held-out episodes"
    )


def distillation_lines(result: Mapping[str, Any]) -> str:
    """Teacher, student and the student's bundle, as ``vla-rl distill`` prints them."""
    lines = []
    for name in ("teacher", "student"):
        rate, cost = Rate.of(result[name]), result[name]
        lines.append(
            f"{name}: success {_percent(rate.success)} ({_interval(rate)}) of {rate.episodes} held-out episodes, "
            f"a chunk in {cost['encode_ms']:.1f} (encode) + {cost['act_ms']:.1f} ms (act)"
        )
    return "\n".join([*lines, result["bundle"]])


def _imagined_line(result: Mapping[str, Any]) -> str:
    before, after = (Rate.of(result["imagined"][name]) for name in ("before", "after"))
    figures = result["world_model"]
    auc, off = figures["success_auc"], figures["delta_success"]
    auc_text = "unknown: no task with held-out successes and failures" if auc is None else f"{auc:.2f}"
    line = (
        f"imagined success {_percent(after.success)} ({_interval(after)}), before training {_percent(before.success)} "
        f"({_interval(before)}), {result['episodes']} held-out starts; no simulator was asked. The world model: AUC of "
        f"success {auc_text}, success of recorded actions {100 * off:.0f} points off"
    )
    return line if result["trained"] else f"{line}. It misses {', '.join(result['missed'])}, so the policy is as cloned"


def comparison(run_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """[{run, before, after, imagined}], success and interval of each; null where a run has no evaluation yet.

    ``imagined``: {before, after} of a run without a simulator, else null.
    """

    def plain(rate: Rate | None) -> dict[str, Any] | None:
        return None if rate is None else {"success": rate.success, "interval": [rate.low, rate.high]}

    return [
        {
            "run": str(run_dir),
            "before": plain(run.before),
            "after": plain(run.after),
            "imagined": {name: plain(rate) for name, rate in run.imagined.items()} or None,
        }
        for run_dir, run in zip(run_dirs, map(read_run, run_dirs), strict=True)
    ]


def group_rows(run_dirs: Sequence[Path]) -> list[dict[str, Any]]:
    """[{group, runs, interquartile_mean, interval, imagined, compute}] of the runs that differ in their seed alone.

    ``imagined``: whether it is the success of imagined episodes.
    """
    found = groups([read_run(run_dir) for run_dir in run_dirs])
    return [
        {
            "group": group.name,
            "runs": len(group.runs),
            "interquartile_mean": None if group.rate is None else group.rate.success,
            "interval": None if group.rate is None else [group.rate.low, group.rate.high],
            "imagined": group.imagined,
            "compute": None if group.compute is None else asdict(group.compute),
        }
        for group in found
    ]


def print_comparison(run_dirs: Sequence[Path]) -> None:
    """Final or imagined success of every run, best first; runs without a final evaluation last."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    columns = ("before", "after", "95 % interval", "gain", "95 % interval", "wall time")
    table = Table(Column("run", overflow="fold"), *columns, box=None, pad_edge=False)

    def success(pair: tuple[str, RunData]) -> float:
        after = pair[1].compared[1]
        return -1.0 if after is None else after.success

    for name, run in sorted(zip(unique_names(runs), runs, strict=True), key=success, reverse=True):
        before, after = run.compared
        cells = ["", "not finished", "", "", ""]
        if before and after:
            gain, low, high = difference(before, after)
            gained = f"{100 * low:+.0f} to {100 * high:+.0f}"
            shown = _percent(after.success) + " imagined" * bool(run.imagined)
            cells = [_percent(before.success), shown, _interval(after), f"{100 * gain:+.0f}", gained]
        table.add_row(escape(name), *cells, duration(run.wall_s) if run.wall_s else "")
    console = for_stdout()
    console.print(table)
    found = groups(runs)
    if len(found) == len(runs):
        return
    heads = ("runs", "interquartile mean", "95 % interval", "with more compute")
    together = Table(Column("differ in their seed", overflow="fold"), *heads)
    for group in found:
        cells = ["", ""]
        if group.rate is not None:
            cells = [_percent(group.rate.success) + " imagined" * group.imagined, _interval(group.rate)]
        together.add_row(escape(group.name), str(len(group.runs)), *cells, str(group.compute or ""))
    console.print(together)


def print_sweep(result: Mapping[str, Any]) -> None:
    """``result`` as ``vla-rl sweep --json`` prints it, best trial first."""
    trials = result["trials"]
    columns = [Column(name, justify="right") for name in short_names(result["settings"]).values()]
    table = Table("trial", "state", result["objective"], *columns, "wall time", "note", box=None, pad_edge=False)
    for trial in trials:
        value = "" if trial["value"] is None else f"{trial['value']:.3f}"
        settings = [escape(f"{one:.4g}" if isinstance(one, float) else str(one)) for one in trial["settings"].values()]
        note = escape(trial["message"])
        table.add_row(str(trial["trial"]), trial["state"], value, *settings, duration(trial["seconds"]), note)
    for_stdout().print(table)


def print_bench(result: Mapping[str, Any]) -> None:
    """``result`` as ``vla-rl bench --json`` prints it."""
    title = " ".join([result["bench"], *(f"{name}={value}" for name, value in result.get("options", {}).items())])
    table = Table("figure", "value", "unit", "ratio", "against", title=escape(title), box=None, pad_edge=False)
    for row in result["rows"]:
        ratio = "" if row.get("ratio") is None else f"{row['ratio']:.3g}"
        against = "" if row.get("against") is None else str(row["against"])
        table.add_row(escape(row["name"]), f"{row['value']:.4g}", row["unit"], ratio, escape(against))
    for_stdout().print(table)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(rate: Rate) -> str:
    return f"{100 * rate.low:.0f} to {100 * rate.high:.0f} %"
