"""Parts of every page: cards, figures, curves, videos, and the formats of rates and durations."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from importlib import resources
from pathlib import Path

from vla_rl.report.run_data import Points, Rate
from vla_rl.report.svg import Line, line_chart, number, percent, smooth

AFTER, BEFORE = 0, 8  # colors of the page's palette
PALETTE = 8
COLORS = PALETTE + 1  # with the gray of BEFORE
ABSENT = "&ndash;"


def document(title: str, body: Iterable[str]) -> str:
    css = resources.files("vla_rl.report").joinpath("page.css").read_text(encoding="utf-8")
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} · vla-rl</title><style>{css}</style></head><body><main>"
        + "".join(body)
        + "<footer>Intervals are Wilson 95 % intervals; the gain's is Newcombe's. "
        "A thin line is the recorded series, a thick one its moving average.</footer></main></body></html>\n"
    )


def section(title: str, figures: Iterable[str]) -> str:
    shown = "".join(figures)
    return f'<h2>{escape(title)}</h2><div class="grid2">{shown}</div>' if shown else ""


def figure(title: str, chart: str, colors: Mapping[str, int]) -> str:
    keys = "".join(
        f'<span><span class="swatch t{color}"></span>{escape(label)}</span>' for label, color in colors.items()
    )
    legend = f'<span class="legend">{keys}</span>' if keys else ""
    return f'<figure class="card"><figcaption><h3>{escape(title)}</h3>{legend}</figcaption>{chart}</figure>'


def card(value: str, what: str, *, css: str = "", tone: str = "") -> str:
    return f'<div class="card {css}"><div class="value {tone}">{value}</div><div class="what">{what}</div></div>'


def tone(low: float, high: float) -> str:
    return "good" if low > 0 else "bad" if high < 0 else ""


def time_bar(title: str, seconds: Mapping[str, float], note: str = "") -> str:
    """One stacked bar of ``seconds`` by name, with each name's seconds and share; nothing where there are none."""
    total = sum(seconds.values())
    if not total:
        return ""
    bar = "".join(
        f'<span class="b{index % COLORS}" style="flex-grow:{value / total:.4f}" title="{escape(name)}"></span>'
        for index, (name, value) in enumerate(seconds.items())
    )
    rows = "".join(
        f'<tr><td><span class="swatch t{index % COLORS}"></span>{escape(name)}</td>'
        f'<td class="n">{precise_duration(value)}</td><td class="n">{percent(value / total)}</td></tr>'
        for index, (name, value) in enumerate(seconds.items())
    )
    text = f'<p class="note">{escape(note)}</p>' if note else ""
    return (
        f'<div class="card"><h3>{escape(title)}</h3><div class="bar" aria-hidden="true">{bar}</div>'
        f"<table>{rows}</table>{text}</div>"
    )


def precise_duration(seconds: float) -> str:
    """As ``duration``, with three digits below ten seconds."""
    return f"{number(seconds)} s" if seconds < 10 else duration(seconds)


def signed(value: float) -> str:
    return f"{100 * value:+.0f}".replace("-", "&minus;")


def interval(rate: Rate) -> str:
    return f"95 %: {100 * rate.low:.0f} to {100 * rate.high:.0f} %"


def rate_cell(rate: Rate | None) -> str:
    if rate is None:
        return ABSENT
    return f'{percent(rate.success)} <span class="soft">[{100 * rate.low:.0f}, {100 * rate.high:.0f}]</span>'


def duration(seconds: float) -> str:
    """Rounded: 48 s, 3 min 20 s, 25 min, 2 h 05 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 600:
        return f"{whole // 60} min {whole % 60:02d} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def metric_figure(points: Points, *, title: str, hint: str = "", color: int = AFTER, x_label: str = "iteration") -> str:
    if len(points) < 2:
        return ""
    chart = line_chart(curve(points, label=title, color=color), title=title, x_label=x_label)
    note = f'<p class="note">{escape(hint)}</p>' if hint else ""
    return figure(title, chart + note, {})


def success_figure(title: str, lines: Sequence[Line]) -> str:
    """Rates of success from 0 to 1, with a legend; nothing where there are no lines."""
    if not lines:
        return ""
    chart = line_chart(lines, title=title, y=(0.0, 1.0), format_y=percent)
    return figure(title, chart, {line.label: line.color for line in lines if not line.faint})


def curve(points: Points, *, label: str, color: int) -> list[Line]:
    """The series; with many points also its moving average, and the recorded series fainter behind it."""
    if len(points) < 20:
        return [Line(label=label, points=points, color=color)] if points else []
    average = smooth(points, max(3, len(points) // 12))
    return [
        Line(label=label, points=points, color=color, faint=True),
        Line(label=label, points=average, color=color),
    ]


def video(path: Path, label: str) -> str:
    """An embedded mp4 with a label below it."""
    data = base64.b64encode(path.read_bytes()).decode()
    return (
        f'<div><video controls autoplay loop muted playsinline aria-label="{escape(path.stem)}" '
        f'src="data:video/mp4;base64,{data}"></video><p>{label}</p></div>'
    )


def short_names(settings: Iterable[str]) -> dict[str, str]:
    """Each setting's last names that tell it from the others: a.rate, b.rate and b.size as a.rate, b.rate, size."""
    paths = {name: name.split(".") for name in settings}

    def short(name: str) -> str:
        path = paths[name]
        others = [other for one, other in paths.items() if one != name]
        lengths = range(1, len(path) + 1)
        length = next((n for n in lengths if all(other[-n:] != path[-n:] for other in others)), len(path))
        return ".".join(path[-length:])

    return {name: short(name) for name in paths}
