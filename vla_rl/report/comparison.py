"""Several runs on one page: results side by side, curves on common axes, and the settings that differ."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from vla_rl.report.aggregates import Group, groups
from vla_rl.report.page import FEATURED
from vla_rl.report.pieces import (
    ABSENT,
    AFTER,
    BEFORE,
    PALETTE,
    curve,
    document,
    duration,
    figure,
    rate_cell,
    section,
    signed,
)
from vla_rl.report.run_data import RunData, difference, per_task
from vla_rl.report.svg import Format, interval_chart, line_chart, number, percent


def comparison_page(runs: Sequence[RunData]) -> str:
    """The HTML of the page."""
    names = unique_names(runs)
    colors = {name: index % PALETTE for index, name in enumerate(names)}
    by_name = dict(zip(names, runs, strict=True))
    body = [
        f'<header><p class="kicker">vla-rl · comparison</p><h1>{len(runs)} runs</h1></header>',
        _runs_table(by_name, colors),
        _groups_table(runs),
        _final_charts(by_name, colors),
        _common_curves(by_name, colors),
        _setting_differences(by_name),
    ]
    return document("Comparison of runs", body)


def unique_names(runs: Sequence[RunData]) -> list[str]:
    """Folder names, or where folder names repeat, the paths below the folder that all have in common."""
    names, paths = [run.name for run in runs], [run.path.resolve() for run in runs]
    if len(set(names)) == len(names):
        return names
    common = Path(os.path.commonpath([path.parent for path in paths]))
    return [str(path.relative_to(common)) for path in paths]


def _runs_table(runs: Mapping[str, RunData], colors: Mapping[str, int]) -> str:
    head = "".join(f'<th class="n">{title}</th>' for title in ("iterations", "before", "after", "gain", "wall time"))
    rows = []
    for name, run in runs.items():
        before, after = run.compared
        gain = signed(difference(before, after)[0]) if before and after else ABSENT
        cells = [
            str(run.iterations),
            rate_cell(before),
            rate_cell(after) + " imagined" * bool(run.imagined),
            gain,
            duration(run.wall_s) if run.wall_s else ABSENT,
        ]
        rows.append(
            f'<tr><td><span class="swatch t{colors[name]}"></span>{escape(name)}</td>'
            + "".join(f'<td class="n">{cell}</td>' for cell in cells)
            + "</tr>"
        )
    table = f"<table><tr><th>run</th>{head}</tr>{''.join(rows)}</table>"
    return f'<div class="card wide" style="margin-top:22px">{table}</div>'


def _groups_table(runs: Sequence[RunData]) -> str:
    """Nothing where no two runs belong together."""
    found = groups(runs)
    if len(found) == len(runs):
        return ""
    rows = "".join(
        f'<tr><td>{escape(group.name)}</td><td class="n">{len(group.runs)}</td>'
        f'<td class="n">{_group_rate(group)}</td><td>{escape(str(group.compute or ""))}</td></tr>'
        for group in found
    )
    head = (
        '<tr><th>runs that differ in their seed</th><th class="n">runs</th><th class="n">interquartile mean</th>'
        "<th>with more compute</th></tr>"
    )
    note = (
        "Of the final success over runs and tasks; 95 % bootstrap interval over runs (Agarwal et al. 2021). A seed "
        "counts once, and there is neither with fewer than two complete runs. With more "
        "compute: a sigmoid through the validations (Khatri et al. 2025), with the interval of where it ends."
    )
    return f'<div class="card wide"><table>{head}{rows}</table><p class="soft">{note}</p></div>'


def _group_rate(group: Group) -> str:
    return rate_cell(group.rate) + " imagined" * (group.imagined and group.rate is not None)


def _final_charts(runs: Mapping[str, RunData], colors: Mapping[str, int]) -> str:
    rows = {name: {"before": run.before, "after": run.after} for name, run in runs.items()}
    known = {name: {kind: rate for kind, rate in row.items() if rate} for name, row in rows.items()}
    known = {name: row for name, row in known.items() if row}
    tasks = list(dict.fromkeys(task for run in runs.values() for task in per_task(run, "rl")))
    by_task = {
        task: {name: rate for name, run in runs.items() if (rate := per_task(run, "rl").get(task))} for task in tasks
    }
    figures = []
    if known:
        legend = {"before": BEFORE, "after": AFTER}
        chart = interval_chart(known, title="Success before and after", colors=legend)
        figures.append(figure("Success before and after", chart, legend))
    if by_task:
        chart = interval_chart(by_task, title="Success per task after", colors=colors)
        figures.append(figure("Success per task after", chart, colors))
    return section("Final success", figures)


def _common_curves(runs: Mapping[str, RunData], colors: Mapping[str, int]) -> str:
    wanted: list[tuple[str, str, Format, tuple[float, float] | None]] = [
        ("success", "Success, exploring", percent, (0.0, 1.0)),
        ("validation", "Success on validation starts", percent, (0.0, 1.0)),
        *((name, title, number, None) for name, (title, _) in FEATURED.items()),
    ]
    figures = []
    for metric, title, format_y, y in wanted:
        lines = [
            line for name, run in runs.items() for line in curve(run.points(metric), label=name, color=colors[name])
        ]
        if lines:
            chart = line_chart(lines, title=title, y=y, format_y=format_y)
            figures.append(figure(title, chart, {line.label: line.color for line in lines}))
    return section("Learning", figures)


def _setting_differences(runs: Mapping[str, RunData]) -> str:
    settings = {name: run.settings for name, run in runs.items()}
    keys = list(dict.fromkeys(key for values in settings.values() for key in values))
    different = [key for key in keys if len({repr(values.get(key)) for values in settings.values()}) > 1]
    if not different:
        return '<h2>Settings</h2><p class="soft">The runs have the same settings.</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name in runs)
    rows = "".join(
        f"<tr><td>{escape(key)}</td>"
        + "".join(f"<td>{escape(str(values.get(key, 'not set')))}</td>" for values in settings.values())
        + "</tr>"
        for key in different
    )
    table = f"<table><tr><th>setting</th>{head}</tr>{rows}</table>"
    return f'<h2>Settings that differ</h2><div class="card wide">{table}</div>'
