"""Charts as SVG text. Colors are CSS classes of the page, so they follow its light or dark scheme."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import accumulate
from statistics import fmean

from vla_rl.report.run_data import Points, Rate

WIDTH, HEIGHT = 480, 250
LEFT, RIGHT, TOP, BOTTOM = 52, 14, 12, 38
MARKERS = 60  # of a line; more would cover it
Format = Callable[[float], str]


@dataclass(frozen=True, kw_only=True)
class Line:
    """``color``: index into the page's palette. ``interval``: (low, high) per point, drawn as whiskers on markers where
    these are few.

    ``faint`` marks a raw series behind its own moving average.
    """

    label: str
    points: Points
    color: int
    faint: bool = False
    interval: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True, kw_only=True)
class Axes:
    """From data to SVG units."""

    x: tuple[float, float]
    y: tuple[float, float]
    width: float = WIDTH
    height: float = HEIGHT
    left: float = LEFT
    right: float = RIGHT
    x_label: str = "iteration"
    format_y: Format = field(default=lambda value: number(value))

    def at_x(self, value: float) -> float:
        return self.left + (value - self.x[0]) / ((self.x[1] - self.x[0]) or 1) * (self.width - self.left - self.right)

    def at_y(self, value: float) -> float:
        return (
            self.height - BOTTOM - (value - self.y[0]) / ((self.y[1] - self.y[0]) or 1) * (self.height - TOP - BOTTOM)
        )


def number(value: float) -> str:
    return "0" if value == 0 else f"{value:.3g}"


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About ``count`` round numbers (1, 2, 2.5 or 5 times a power of ten apart) within [low, high]."""
    if high <= low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def smooth(points: Points, window: int) -> Points:
    """Moving average over ``window`` points, centered and narrower at the ends."""
    half = window // 2
    sums = list(accumulate((y for _, y in points), initial=0.0))
    out = []
    for i, (x, _) in enumerate(points):
        first, end = max(0, i - half), min(len(points), i + half + 1)
        out.append((x, (sums[end] - sums[first]) / (end - first)))
    return out


def thinned(points: Points) -> Points:
    """A long curve in about as many points as the chart is wide: the lowest and the highest of each part, in order."""
    size = math.ceil(2 * len(points) / WIDTH)
    if size <= 2:
        return points
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), size):
        part = range(start, min(start + size, len(points)))
        ends = {min(part, key=lambda i: points[i][1]), max(part, key=lambda i: points[i][1])}
        kept += [points[i] for i in sorted(ends)]
    return kept


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    y: tuple[float, float] | None = None,
    format_y: Format = number,
    x_label: str = "iteration",
) -> str:
    """Values over iterations. ``y``: the axis' range, default: that of the data."""
    xs = [x for line in lines for x, _ in line.points]
    ys = [value for line in lines for _, value in line.points]
    axes = Axes(x=(min(xs), max(xs)), y=y or _range(ys), format_y=format_y, x_label=x_label)
    drawn = [_line(axes, line) for line in lines]
    description = "; ".join(_describe(line, format_y) for line in lines if not line.faint)
    return _svg(_grid(axes) + "".join(drawn), axes, title=title, description=description)


def stacked_area(layers: Mapping[str, Points], *, title: str) -> str:
    """Seconds per iteration, stacked; every layer has the same iterations."""
    averages = {name: fmean(value for _, value in points) for name, points in layers.items()}
    layers = {name: _in_parts(points) for name, points in layers.items()}
    xs = [x for x, _ in next(iter(layers.values()))]
    totals = [sum(points[i][1] for points in layers.values()) for i in range(len(xs))]
    axes = Axes(x=(min(xs), max(xs)), y=(0.0, max(totals) * 1.05 or 1.0), format_y=lambda value: f"{number(value)} s")
    base = [0.0] * len(xs)
    parts = []
    for color, (name, points) in enumerate(layers.items()):
        top = [below + value for below, (_, value) in zip(base, points, strict=True)]
        outline = [(x, value) for x, value in zip(xs, top, strict=True)]
        outline += [(x, value) for x, value in zip(reversed(xs), reversed(base), strict=True)]
        parts.append(
            f'<path class="area f{color}" d="{_path(axes, outline)}Z"><title>{escape(name)}: '
            f"{number(averages[name])} s per iteration on average</title></path>"
        )
        base = top
    description = f"on average {number(sum(averages.values()))} s per iteration"
    return _svg(_grid(axes) + "".join(parts), axes, title=title, description=description)


def _in_parts(points: Points) -> Points:
    """A long curve in at most as many points as the chart is wide: the mean of each part."""
    size = math.ceil(len(points) / WIDTH)
    parts = (points[start : start + size] for start in range(0, len(points), size))
    return [(fmean(x for x, _ in part), fmean(y for _, y in part)) for part in parts]


def interval_chart(rows: Mapping[str, Mapping[str, Rate]], *, title: str, colors: Mapping[str, int]) -> str:
    """Success rates with their intervals, one row per name, one dot per series."""
    label = 14 + 8 * max(len(name) for name in rows)
    row_height = 16 + 9 * max(len(rates) for rates in rows.values())
    bottom = TOP + row_height * len(rows)
    axes = Axes(x=(0.0, 1.0), y=(0.0, 1.0), height=bottom + 26, left=min(190.0, label), right=24)
    parts = [
        f'<line class="grid" x1="{axes.at_x(v):.1f}" x2="{axes.at_x(v):.1f}" y1="{TOP}" y2="{bottom}"/>'
        f'<text class="tick" x="{axes.at_x(v):.1f}" y="{bottom + 18}" text-anchor="middle">{percent(v)}</text>'
        for v in (0, 0.25, 0.5, 0.75, 1)
    ]
    for index, (name, rates) in enumerate(rows.items()):
        center = TOP + row_height * (index + 0.5)
        shown = escape(name if len(name) <= 25 else name[:24] + "…")
        parts.append(f'<text class="label" x="{axes.left - 10:.1f}" y="{center + 4}" text-anchor="end">{shown}</text>')
        for place, (series, rate) in enumerate(rates.items()):
            y = center + 9 * (place - (len(rates) - 1) / 2)
            parts.append(_whisker(axes, rate, y, colors[series], f"{name}, {series}"))
    description = "; ".join(
        f"{name}: " + ", ".join(f"{series} {percent(rate.success)}" for series, rate in rates.items())
        for name, rates in rows.items()
    )
    return _svg("".join(parts), axes, title=title, description=description)


def scatter_chart(
    points: Sequence[tuple[float, float, str]],
    *,
    title: str,
    marks: Sequence[tuple[float, str]],
    x_label: str,
) -> str:
    """(x, y, name) as dots, y a share; ``marks``: (x, text) below the axis, whose first and last are its ends."""
    low, high = marks[0][0], marks[-1][0]
    margin = 0.05 * (high - low) or 0.5
    axes = Axes(x=(low - margin, high + margin), y=_range([y for _, y, _ in points]), format_y=percent, x_label=x_label)
    dots = [
        f'<g><title>{escape(name)}</title><circle class="dot f0" cx="{axes.at_x(x):.1f}" '
        f'cy="{axes.at_y(y):.1f}" r="5"/></g>'
        for x, y, name in points
    ]
    best = max(points, key=lambda point: point[1])
    description = f"{len(points)} points; the highest: {best[2]}"
    return _svg(_grid(axes, marks) + "".join(dots), axes, title=title, description=description)


def _whisker(axes: Axes, rate: Rate, y: float, color: int, name: str) -> str:
    low, middle, high = axes.at_x(rate.low), axes.at_x(rate.success), axes.at_x(rate.high)
    text = f"{name}: {percent(rate.success)}, 95 % interval {percent(rate.low)} to {percent(rate.high)}"
    return (
        f'<g><title>{escape(text)}</title><line class="whisker s{color}" x1="{low:.1f}" x2="{high:.1f}" '
        f'y1="{y:.1f}" y2="{y:.1f}"/><circle class="dot f{color}" cx="{middle:.1f}" cy="{y:.1f}" r="5"/></g>'
    )


def _range(values: Sequence[float]) -> tuple[float, float]:
    """The range of the data with a margin; from zero where the data is close to it."""
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    if 0 <= low < 0.4 * high:
        return 0.0, high + margin
    return low - margin, high + margin


def _path(axes: Axes, points: Points) -> str:
    return "M" + "L".join(f"{axes.at_x(x):.1f} {axes.at_y(y):.1f}" for x, y in points)


def _line(axes: Axes, line: Line) -> str:
    css = f"line s{line.color}" + (" faint" if line.faint else "")
    parts = [f'<path class="{css}" d="{_path(axes, thinned(line.points))}"/>'] if len(line.points) > 1 else []
    if (line.interval and len(line.points) <= MARKERS) or len(line.points) == 1:
        intervals = line.interval or [(y, y) for _, y in line.points]
        for (x, y), (low, high) in zip(line.points, intervals, strict=True):
            text = (
                f"{line.label}, iteration {x:.0f}: {axes.format_y(y)} ({axes.format_y(low)} to {axes.format_y(high)})"
            )
            parts.append(
                f'<g><title>{escape(text)}</title><line class="whisker s{line.color}" x1="{axes.at_x(x):.1f}" '
                f'x2="{axes.at_x(x):.1f}" y1="{axes.at_y(low):.1f}" y2="{axes.at_y(high):.1f}"/>'
                f'<circle class="dot f{line.color}" cx="{axes.at_x(x):.1f}" cy="{axes.at_y(y):.1f}" r="4"/></g>'
            )
    return "".join(parts)


def _grid(axes: Axes, marks: Sequence[tuple[float, str]] | None = None) -> str:
    """``marks``: (x, text) below the axis; default: round whole numbers."""
    right, bottom = axes.width - axes.right, axes.height - BOTTOM
    if marks is None:
        marks = [(value, f"{value:.0f}") for value in ticks(*axes.x) if value == round(value)]
    parts = []
    for value in ticks(*axes.y):
        y = axes.at_y(value)
        parts.append(
            f'<line class="grid" x1="{axes.left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="tick" x="{axes.left - 7}" y="{y + 4:.1f}" text-anchor="end">{axes.format_y(value)}</text>'
        )
    parts += [
        f'<text class="tick" x="{axes.at_x(value):.1f}" y="{bottom + 17}" '
        f'text-anchor="{"middle" if axes.at_x(value) < right or len(text) < 4 else "end"}">{escape(text)}</text>'
        for value, text in marks
    ]
    parts.append(f'<text class="tick" x="{right}" y="{bottom + 33}" text-anchor="end">{escape(axes.x_label)}</text>')
    return "".join(parts)


def _describe(line: Line, format_y: Format) -> str:
    best = max(y for _, y in line.points)
    first, last = line.points[0][1], line.points[-1][1]
    return f"{line.label}: first {format_y(first)}, last {format_y(last)}, highest {format_y(best)}"


def _svg(body: str, axes: Axes, *, title: str, description: str) -> str:
    return (
        f'<svg viewBox="0 0 {axes.width:.0f} {axes.height:.0f}" role="img" aria-label="{escape(title)}. '
        f'{escape(description)}">{body}</svg>'
    )
