"""A run's data to HTML: every function here returns a part of the page, empty where the run lacks the data."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from vla_rl.report.imagination import imagination, imagined_headline
from vla_rl.report.pieces import (
    AFTER,
    BEFORE,
    PALETTE,
    card,
    curve,
    document,
    duration,
    figure,
    interval,
    metric_figure,
    rate_cell,
    section,
    signed,
    success_figure,
    time_bar,
    tone,
    video,
)
from vla_rl.report.run_data import Rate, RunData, difference, per_task, series
from vla_rl.report.svg import Line, interval_chart, percent, stacked_area

FEATURED = {  # metric -> title, and how to read it
    "kl": ("KL to the rollout's policy", "how far one update changes the policy; it should not keep rising"),
    "clip_fraction": (
        "Clip fraction",
        "share of probability ratios that are clipped; above 0.3 clipping limits learning",
    ),
    "explained_variance": ("Value: explained variance", "1 is a perfect critic, 0 is no better than a constant"),
}


STAGES = ("simulate", "render", "encode", "infer", "learn", "sync", "idle", "validate", "save")  # of an iteration


def run_page(run: RunData) -> str:
    """The whole page of one run."""
    body = [
        _header(run),
        _headline(run),
        _tasks(run),
        _controls(run),
        _learning(run),
        imagination(run),
        _videos(run),
        _time(run),
        _failures(run),
        _all_figures(run),
        _reproduce(run),
    ]
    return document(run.name, body)


def _header(run: RunData) -> str:
    settings = run.settings
    parts = [str(settings[key]) for key in ("algorithm.name", "sim.name") if key in settings]
    if "seed" in settings:
        parts.append(f"seed {settings['seed']}")
    kicker = escape(" · ".join(["vla-rl", *parts]))
    return f'<header><p class="kicker">{kicker}</p><h1>{escape(run.name)}</h1></header>'


def _headline(run: RunData) -> str:
    """Success before and after, and one sentence about whether the difference is significant."""
    if "imagined" in run.result:
        return imagined_headline(run.result)
    before, after = run.before, run.after
    if before is None or after is None:
        done = run.iterations
        return f'<p class="lead">No final evaluation yet: {done} iteration{"s" * (done != 1)} recorded so far.</p>'
    gain, low, high = difference(before, after)
    cards = [
        card(percent(before.success), f"success before RL<br>{interval(before)}", css="plain"),
        card(percent(after.success), f"success after RL<br>{interval(after)}", css="main"),
        card(signed(gain), f"gain in percentage points<br>95 %: {signed(low)} to {signed(high)}", tone=tone(low, high)),
    ]
    if run.wall_s:
        cards.append(card(duration(run.wall_s), "wall time of the whole run"))
    return f'<div class="cards">{"".join(cards)}</div><p class="lead">{escape(_conclusion(run, gain, low, high))}</p>'


def _conclusion(run: RunData, gain: float, low: float, high: float) -> str:
    episodes = run.result.get("episodes")
    on = f" on {episodes} episodes from held-out start states" if episodes else ""
    if low > 0:
        return f"The final policy succeeds {100 * gain:.0f} points more often{on}; the interval excludes zero."
    if high < 0:
        return f"The final policy succeeds {-100 * gain:.0f} points less often{on}; the interval excludes zero."
    return (
        f"A change of {100 * gain:+.0f} points{on} is within the noise of this evaluation: its interval includes zero."
    )


def _tasks(run: RunData) -> str:
    rates = {"before": per_task(run, "bc"), "after": per_task(run, "rl")}
    names = list(dict.fromkeys(name for tasks in rates.values() for name in tasks))
    rows = {name: {kind: tasks[name] for kind, tasks in rates.items() if name in tasks} for name in names}
    if not rows:
        return ""
    for kind, key in (("before", "bc"), ("after", "rl")):
        if key in run.result:
            rows.setdefault("all tasks", {})[kind] = Rate.of(run.result[key])
    colors = {"before": BEFORE, "after": AFTER}
    chart = interval_chart(rows, title="Success per task before and after", colors=colors)
    extra = ""
    if "stochastic" in run.result:
        rate = Rate.of(run.result["stochastic"])
        text = f"With exploration noise the final policy reaches {percent(rate.success)} ({interval(rate)})."
        extra = f'<p class="note">{text}</p>'
    shown = figure("Success rate and 95 % interval", chart, colors)
    return section("Success per task", [shown, f'<div class="card">{_task_table(rows)}{extra}</div>'])


def _controls(run: RunData) -> str:
    """The final policy with a part of its observation removed or exchanged, and on the simulator's other splits."""
    tables = [
        _rate_table(title, {name: _rate(run, name, row) for name, row in run.result[key].items()}, note)
        for key, title, note in (
            ("controls", "Controls", "Success with a part of the observation blanked or exchanged."),
            ("splits", "Out of distribution", "Success on splits that training did not see."),
        )
        if run.result.get(key)
    ]
    return section("What the policy depends on", tables)


def _rate(run: RunData, name: str, row: Mapping[str, Any] | None) -> Rate | str:
    """Or why it does not apply."""
    return f"does not apply: {run.result['not_applicable'][name]}" if row is None else Rate.of(row)


def _rate_table(title: str, rates: Mapping[str, Rate | str], note: str) -> str:
    rows = "".join(
        f"<tr><td>{escape(name.replace('_', ' '))}</td>"
        f'<td class="n">{escape(rate) if isinstance(rate, str) else rate_cell(rate)}</td></tr>'
        for name, rate in rates.items()
    )
    return f'<div class="card"><h3>{title}</h3><table>{rows}</table><p class="note">{note}</p></div>'


def _failures(run: RunData) -> str:
    """Simulator processes that failed and were replaced."""
    if not run.failures:
        return ""
    head = "<tr><th>stage</th><th>environment</th><th>request</th><th>cause</th></tr>"
    rows = "".join(
        f"<tr><td>{escape(str(one['stage']))}</td><td>{one['env_id']}</td><td>{escape(one['request'])}</td>"
        f"<td>{escape(one['cause'])}{_stderr(one['stderr'])}</td></tr>"
        for one in run.failures
    )
    count = len(run.failures)
    text = f"{count} simulator process{'es' * (count != 1)} failed and {'were' if count != 1 else 'was'} replaced."
    note = f'<p class="note">{text} Unfinished chunks are not trained on.</p>'
    return section(
        "Worker failures", [f'<div class="card"><div class="wide"><table>{head}{rows}</table></div>{note}</div>']
    )


def _stderr(stderr: str) -> str:
    return f"<details><summary>standard error</summary><pre>{escape(stderr)}</pre></details>" if stderr else ""


def _task_table(rows: Mapping[str, Mapping[str, Rate]]) -> str:
    head = '<tr><th>task</th><th class="n">before</th><th class="n">after</th></tr>'
    body = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f'<td class="n">{rate_cell(rates.get(kind))}</td>' for kind in ("before", "after"))
        + "</tr>"
        for name, rates in rows.items()
    )
    return f'<div class="wide"><table>{head}{body}</table></div>'


def _learning(run: RunData) -> str:
    figures = [_success_figure(run)]
    for name, (title, hint) in FEATURED.items():
        figures.append(metric_figure(run.points(name), title=title, hint=hint))
    loss = series(run.imitation, "bc_loss")
    figures.append(metric_figure(loss, title="Behavior cloning loss", color=BEFORE, x_label="gradient step"))
    figures.append(_validation_figure(run))
    return section("Learning", figures)


def _success_figure(run: RunData) -> str:
    lines = curve(run.points("success"), label="exploring policy, training starts", color=AFTER)
    if points := run.points("validation"):
        ends = zip(run.points("validation_low"), run.points("validation_high"), strict=True)
        intervals = [(low, high) for (_, low), (_, high) in ends]
        lines.append(Line(label="deployed policy, validation starts", points=points, color=1, interval=intervals))
    return success_figure("Success", lines)


def _validation_figure(run: RunData) -> str:
    names = [name for name in run.names() if name.startswith("validation/")]
    lines = [
        Line(label=name.removeprefix("validation/"), points=points, color=index % PALETTE)
        for index, name in enumerate(names)
        if len(points := run.points(name)) > 1
    ]
    return success_figure("Validation per task", lines)


def _videos(run: RunData) -> str:
    tasks = list(dict.fromkeys(stem.partition("_")[2] for stem in run.videos if stem.startswith(("bc_", "rl_"))))
    pairs = []
    for task in tasks:
        videos = [
            video(path, label)
            for prefix, label in (("bc_", "before"), ("rl_", "after"))
            if (path := run.videos.get(prefix + task)) is not None
        ]
        pairs.append(f'<div class="card"><h3>{escape(task)}</h3><div class="pair">{"".join(videos)}</div></div>')
    if not pairs:
        return ""
    note = '<p class="note">The same start states in both. Green border: success; red border: failure.</p>'
    return f'<h2>Before and after</h2>{note}<div class="videos">{"".join(pairs)}</div>'


def _time(run: RunData) -> str:
    bars = [
        time_bar("Stages of the run", run.stage_s),
        time_bar("An iteration", stage_seconds(run, "time/"), "Mean over all iterations. idle: waiting for rollouts."),
        time_bar("An iteration of a collector", stage_seconds(run, "collectors/"), "Mean over collectors."),
    ]
    return section("Wall time", [*bars, _sections(run)])


def stage_seconds(run: RunData, prefix: str) -> dict[str, float]:
    """Mean seconds of an iteration by stage, from metrics ``<prefix><stage>_s``, in the order of the work."""
    names = [name for name in run.names() if name.startswith(prefix) and name.endswith("_s")]
    stages = {name.removeprefix(prefix).removesuffix("_s"): name for name in names}
    order = [*STAGES, *(stage for stage in stages if stage not in STAGES)]
    sums = {stage: sum(row.get(stages[stage]) or 0.0 for row in run.metrics) for stage in order if stage in stages}
    return {stage: total / len(run.metrics) for stage, total in sums.items() if total}


def _sections(run: RunData) -> str:
    layers = {
        stage: [(row["iteration"], row.get(f"time/{stage}_s") or 0.0) for row in run.metrics]
        for stage in stage_seconds(run, "time/")
    }
    if not layers or len(run.metrics) < 2:
        return ""
    chart = stacked_area(layers, title="Seconds per iteration")
    return figure("Seconds per iteration", chart, {name: index for index, name in enumerate(layers)})


def _all_figures(run: RunData) -> str:
    featured = {*FEATURED, "success", "validation", "validation_low", "validation_high"}
    rest = [
        name
        for name in run.names()
        if name not in featured and not name.startswith(("time/", "collectors/", "validation/"))
    ]
    figures = [shown for name in rest if (shown := metric_figure(run.points(name), title=name))]
    if not figures:
        return ""
    grid = f'<div class="grid2 small">{"".join(figures)}</div>'
    return f"<details><summary>{len(figures)} more metrics</summary>{grid}</details>"


def _reproduce(run: RunData) -> str:
    parts = ["<h2>Reproduce</h2>"]
    if run.command:
        parts.append(f"<pre>{escape(run.command)}</pre>")
    if fingerprint := run.result.get("fingerprint"):
        rows = "".join(f"<tr><td>{escape(str(k))}</td><td>{escape(str(v))}</td></tr>" for k, v in fingerprint.items())
        table = f'<div class="wide"><table>{rows}</table></div>'
        parts.append(f"<details><summary>Versions and machine</summary>{table}</details>")
    if run.config_text:
        parts.append(
            f"<details><summary>Resolved configuration</summary><pre>{escape(run.config_text)}</pre></details>"
        )
    return "".join(parts) if len(parts) > 1 else ""
