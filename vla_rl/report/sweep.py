"""The page of a sweep: its trials, best first, their validation curves, and the objective over each setting."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from itertools import accumulate
from pathlib import Path
from typing import Any

from vla_rl.report.pieces import ABSENT, AFTER, BEFORE, PALETTE, card, document, duration, figure, section, short_names
from vla_rl.report.svg import Line, line_chart, number, percent, scatter_chart, ticks

Trial = Mapping[str, Any]


def sweep_page(sweep: Mapping[str, Any], folder: Path) -> str:
    """The HTML of the page. ``sweep``: as sweep.json has it; ``folder``: where it lies."""
    trials = sweep["trials"]
    name = folder.resolve().name
    complete = [trial for trial in trials if trial["state"] == "complete"]
    body = [
        f'<header><p class="kicker">vla-rl · sweep</p><h1>{escape(name)}</h1></header>',
        _headline(trials, complete, sweep["objective"]),
        _table(trials, complete),
        section("Progress", [_by_trial(complete), _curves(trials)]),
        section("Settings", _over_settings(complete, sweep["settings"])),
        f"<h2>Reproduce</h2><pre>{escape(sweep['command'])}</pre>",
    ]
    return document(f"Sweep {name}", body)


def _headline(trials: Sequence[Trial], complete: Sequence[Trial], objective: str) -> str:
    counts = {state: sum(trial["state"] == state for trial in trials) for state in ("complete", "pruned", "failed")}
    listed = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    cards = [
        card(percent(complete[0]["value"]) if complete else ABSENT, f"{escape(objective)}, best trial", css="main"),
        card(str(len(trials)), f"trials: {listed}" if listed else "trials"),
        card(duration(sum(trial["seconds"] for trial in trials)), "wall time of all runs"),
    ]
    note = (
        "The best of many trials looks better than it is: its value was chosen for being high. "
        "Train its settings with new seeds, and evaluate those runs on held-out starts."
    )
    return f'<div class="cards">{"".join(cards)}</div><p class="lead">{note}</p>'


def _table(trials: Sequence[Trial], complete: Sequence[Trial]) -> str:
    names = short_names(trials[0]["settings"] if trials else ())
    head = "".join(f'<th class="n">{escape(short)}</th>' for short in names.values())
    rows = []
    for trial in trials:
        value = ABSENT if trial["value"] is None else percent(trial["value"])
        settings = "".join(f'<td class="n">{escape(_short(trial["settings"][name]))}</td>' for name in names)
        note = f'<br><span class="soft">{escape(trial["message"])}</span>' if trial["message"] else ""
        rows.append(
            f"<tr><td>{_swatch(trial, complete)}{trial['trial']}</td><td>{trial['state']}{note}</td>"
            f'<td class="n">{value}</td>{settings}<td class="n">{duration(trial["seconds"])}</td></tr>'
        )
    table = (
        f'<table><tr><th>trial</th><th>state</th><th class="n">objective</th>{head}<th class="n">wall time</th></tr>'
        f"{''.join(rows)}</table>"
    )
    return f'<div class="card wide" style="margin-top:22px">{table}</div>'


def _swatch(trial: Trial, complete: Sequence[Trial]) -> str:
    """The color of a trial whose curve is drawn."""
    place = next((i for i, one in enumerate(complete[:PALETTE]) if one is trial), None)
    return "" if place is None else f'<span class="swatch t{place}"></span>'


def _by_trial(complete: Sequence[Trial]) -> str:
    if not complete:
        return ""
    ordered = sorted((trial["trial"], trial["value"]) for trial in complete)
    best = zip([x for x, _ in ordered], accumulate((y for _, y in ordered), max), strict=True)
    lines = [
        Line(label="best so far", points=list(best), color=BEFORE),
        *(Line(label=f"trial {x}", points=[(x, y)], color=AFTER) for x, y in ordered),
    ]
    chart = line_chart(lines, title="Objective of each trial", format_y=percent, x_label="trial")
    return figure("Objective of each trial", chart, {"complete trial": AFTER, "best so far": BEFORE})


def _curves(trials: Sequence[Trial]) -> str:
    """Of the best complete trials in color, of the others in gray."""
    colors: dict[str, int] = {}
    lines = []
    for trial in trials:
        if not trial["curve"]:
            continue
        points = [(float(step + 1), value) for step, value in enumerate(trial["curve"])]
        label = f"trial {trial['trial']}"
        if trial["state"] == "complete" and len(colors) < PALETTE:
            colors[label] = len(colors)
        lines.append(Line(label=label, points=points, color=colors.get(label, BEFORE), faint=label not in colors))
    if not lines:
        return ""
    chart = line_chart(lines[::-1], title="Validation", y=(0.0, 1.0), format_y=percent, x_label="validation")
    return figure("Validation, mean over the seeds so far", chart, colors)


def _over_settings(complete: Sequence[Trial], settings: Mapping[str, Any]) -> list[str]:
    if len(complete) < 2:
        return []
    return [_over_setting(complete, name, short, settings[name]) for name, short in short_names(settings).items()]


def _over_setting(complete: Sequence[Trial], name: str, short: str, values: Any) -> str:
    if isinstance(values, Mapping):
        scale = math.log10 if values["log"] else float
        ends = [values["low"], values["high"]]
        between = [math.sqrt(ends[0] * ends[1])] if values["log"] else ticks(ends[0], ends[1])
        if all(isinstance(end, int) for end in ends):
            between = [value for value in between if value == round(value)]
        marked = sorted({*ends, *(one for one in between if ends[0] < one < ends[1])})
        marks = [(scale(value), number(value)) for value in _apart(marked, scale)]
        points = [(scale(trial["settings"][name]), trial) for trial in complete]
    else:
        marks = [(float(place), _short(value)) for place, value in enumerate(values)]
        points = [(float(values.index(trial["settings"][name])), trial) for trial in complete]
    dots = [(x, trial["value"], f"trial {trial['trial']}: {percent(trial['value'])}") for x, trial in points]
    chart = scatter_chart(dots, title=f"Objective over {name}", marks=marks, x_label=short)
    return figure(name, chart, {})


def _apart(values: Sequence[float], scale: Any) -> list[float]:
    """Without those between whose text would touch that of an end."""
    low, high = scale(values[0]), scale(values[-1])
    gap = 0.12 * (high - low)
    inner = [value for value in values[1:-1] if low + gap < scale(value) < high - gap]
    return [values[0], *inner, values[-1]]


def _short(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return str(value).lower()
        case float():
            return number(value)
    return str(value)
