"""Results on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vla_rl.report.comparison import unique_names
from vla_rl.report.pieces import duration
from vla_rl.report.run_data import Rate, difference, read_run


def print_evaluation(result: Mapping[str, Any], console: Console | None = None) -> None:
    """``result`` as ``vla-rl eval --json`` prints it: overall, per task, and the exploring policy."""
    table = Table("task", "success", "95 % interval", "episodes", box=None, pad_edge=False)
    rows = {**result["per_task"], "all": {**result, "episodes": result["episodes"]}}
    if "stochastic" in result:
        rows["all, exploring"] = result["stochastic"]
    for name, row in rows.items():
        rate = Rate.of(row)
        episodes = "" if rate.episodes is None else str(rate.episodes)
        table.add_row(escape(name), _percent(rate.success), _interval(rate), episodes)
    console = console or Console()
    console.print(table)
    if "score_table" in result:
        console.print("", result["score_table"], sep="\n", highlight=False, markup=False)


def print_comparison(run_dirs: Sequence[Path], console: Console | None = None) -> None:
    """Final success of every run, best first; runs without a final evaluation last."""
    runs = [read_run(run_dir) for run_dir in run_dirs]
    table = Table(
        "run", "before", "after", "95 % interval", "gain", "95 % interval", "wall time", box=None, pad_edge=False
    )
    named = sorted(
        zip(unique_names(runs), runs, strict=True), key=lambda pair: -(pair[1].after.success if pair[1].after else -1)
    )
    for name, run in named:
        before, after = run.before, run.after
        cells = ["", "not finished", "", "", ""]
        if before and after:
            gain, low, high = difference(before, after)
            gained = f"{100 * low:+.0f} to {100 * high:+.0f}"
            cells = [_percent(before.success), _percent(after.success), _interval(after), f"{100 * gain:+.0f}", gained]
        seconds = sum(value for value in run.result.get("wall_s", {}).values() if value)
        table.add_row(escape(name), *cells, duration(seconds) if seconds else "")
    (console or Console()).print(table)


def print_bench(result: Mapping[str, Any], console: Console | None = None) -> None:
    """``result`` as ``vla-rl bench --json`` prints it."""
    table = Table(
        "figure", "value", "unit", "ratio", "against", title=escape(str(result["bench"])), box=None, pad_edge=False
    )
    for row in result["rows"]:
        ratio = "" if row.get("ratio") is None else f"{row['ratio']:.3g}"
        against = "" if row.get("against") is None else str(row["against"])
        table.add_row(escape(row["name"]), f"{row['value']:.4g}", row["unit"], ratio, escape(against))
    (console or Console()).print(table)


def _percent(value: float) -> str:
    return f"{100 * value:.1f} %"


def _interval(rate: Rate) -> str:
    return f"{100 * rate.low:.0f} to {100 * rate.high:.0f} %"
