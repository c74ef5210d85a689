"""The page's section on reinforcement learning in a world model, round by round."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any

from vla_rl.report.pieces import (
    ABSENT,
    PALETTE,
    card,
    curve,
    interval,
    metric_figure,
    rate_cell,
    section,
    signed,
    success_figure,
    video,
)
from vla_rl.report.run_data import Rate, Round, RunData, series
from vla_rl.report.svg import percent
from world_models.evaluation.evaluate import better_than_copy, deciding_auc

THRESHOLDS = "max_hallucinated", "min_success_auc", "stop_below_auc", "max_delta_success"
VALIDATED = {"validate_clone": "after cloning its successes", "validate": "after imagined training"}


def imagination(run: RunData) -> str:
    if not run.rounds:
        return ""
    last = run.rounds[-1].metrics
    learned = [
        _success(run.rounds),
        metric_figure(series(last, "kl"), title="KL in imagination", hint="last round"),
        metric_figure(series(last, "explained_variance"), title="Value: explained variance", hint="last round"),
    ]
    return section("Imagination", [_evaluation(run), _validation(run), *learned]) + _videos(run.rounds)


def imagined_headline(result: Mapping[str, Any]) -> str:
    """Of a run from logs alone, whose success was only imagined."""
    before, after = (Rate.of(result["imagined"][name]) for name in ("before", "after"))
    cards = [
        card(percent(before.success), f"imagined success before training<br>{interval(before)}", css="plain"),
        card(percent(after.success), f"imagined success after training<br>{interval(after)}", css="main"),
    ]
    said = (
        "Episodes of the world model from held-out recorded starts: no simulator and no robot was asked, so these "
        "figures are worth what the evaluation of the world model below is worth."
    )
    if not result["trained"]:
        said += f" It misses {', '.join(result['missed'])}: nothing was trained in it, and the policy is as cloned."
    return f'<div class="cards">{"".join(cards)}</div><p class="lead">{said}</p>'


def _evaluation(run: RunData) -> str:
    """The world model's evaluation on held-out episodes in every round, beside the thresholds."""
    evaluated = {n: one.stages["evaluate_model"] for n, one in enumerate(run.rounds) if "evaluate_model" in one.stages}
    if not evaluated:
        return ""
    reports = list(evaluated.values())
    thresholds = _thresholds(run.settings)
    head = _row("", "threshold", [f"round {number}" for number in evaluated])
    note = (
        "On held-out recorded episodes. Red misses its threshold, or does not measure it, which halves the imagined "
        "episodes (GRPO and RECAP train nothing then); of the AUCs the colored one counts. The AUC by the recorded "
        "images is what the reward model reaches without the dynamics."
    )
    table = "".join([head, *_figures(reports, thresholds)])
    return (
        '<div class="card"><h3>Evaluation of the world model</h3>'
        f'<div class="wide"><table>{table}</table></div><p class="note">{note}</p></div>'
    )


def _thresholds(settings: Mapping[str, Any]) -> dict[str, float | None]:
    """None: the configuration has none. ``min_success_auc``: at least the AUC below which nothing is trained."""
    thresholds = {name: settings.get(f"imagination.thresholds.{name}") for name in THRESHOLDS}
    least, stop = thresholds["min_success_auc"], thresholds["stop_below_auc"]
    if least is not None and stop is not None:
        thresholds["min_success_auc"] = max(least, stop)
    return thresholds


def _figures(reports: Sequence[Mapping[str, Any]], thresholds: Mapping[str, float | None]) -> list[str]:
    """A row of the table per figure, a cell per evaluation."""
    deepest = f"after {reports[0]['horizons'][-1]} chunks"
    return [
        _row(
            "hallucinated success (actions of another episode)",
            _limit("&le;", thresholds["max_hallucinated"], percent),
            [_hallucinated(report, thresholds["max_hallucinated"]) for report in reports],
        ),
        _row(
            "the same with a frozen picture, and by a model without actions",
            "",
            [_controls(report) for report in reports],
        ),
        _row(
            "outcome AUC, length-matched",
            _limit("&ge;", thresholds["min_success_auc"], lambda value: f"{value:.2f}"),
            [_auc(report, thresholds["min_success_auc"], "length_matched_auc") for report in reports],
        ),
        _row(
            "the same by the recorded images",
            "",
            [_auc(report, None, "recorded_auc") for report in reports],
        ),
        _row(
            "AUC of imagined success",
            _limit("&ge;", thresholds["min_success_auc"], lambda value: f"{value:.2f}"),
            [_auc(report, thresholds["min_success_auc"], "success_auc") for report in reports],
        ),
        _row(
            "imagined minus true success [points]",
            _limit("&plusmn;", thresholds["max_delta_success"], lambda value: f"{100 * value:.0f}"),
            [_difference(report, thresholds["max_delta_success"]) for report in reports],
        ),
        _row(
            "the same task by task, without sign [points]",
            _limit("&le;", thresholds["max_delta_success"], lambda value: f"{100 * value:.0f}"),
            [_task_difference(report, thresholds["max_delta_success"]) for report in reports],
        ),
        _row(
            f"PSNR {deepest}, of a copy of the first frame [dB]",
            "&gt; copy at every depth",
            [_psnr(one) for one in reports],
        ),
        _row(
            f"object error {deepest}, of a copy [mm]", "", [_beside_copy(one, "object_error_m", 1e3) for one in reports]
        ),
    ]


def _row(title: str, threshold: str, cells: Sequence[str]) -> str:
    return f"<tr><td>{title}</td>" + "".join(f'<td class="n">{cell}</td>' for cell in (threshold, *cells)) + "</tr>"


def _limit(sign: str, limit: float | None, show: Callable[[float], str]) -> str:
    return "" if limit is None else f"{sign} {show(limit)}"


def _hallucinated(report: Mapping[str, Any], limit: float | None) -> str:
    value = report["hallucinated_success"]
    if value is None:
        return _measured("not measured", None, _beyond(1.0, limit))
    return _measured(percent(value), _points(report.get("hallucinated_success_interval")), _beyond(value, limit))


def _controls(report: Mapping[str, Any]) -> str:
    """What a model would hallucinate that does not look at the images, and one that does not know the actions."""
    names = "frozen_picture_hallucinated_success", "no_action_hallucinated_success"
    return ", ".join("none" if report.get(name) is None else percent(report[name]) for name in names)


def _auc(report: Mapping[str, Any], limit: float | None, name: str) -> str:
    value, ends = report.get(name), report.get(f"{name}_interval")
    counts, short = name == deciding_auc(report), limit is not None and (value or 0.0) < limit
    if value is None:
        return _measured("not measured", None, short) if counts else ABSENT
    return _measured(f"{value:.2f}", ends and f"{ends[0]:.2f}, {ends[1]:.2f}", short if counts else None)


def _difference(report: Mapping[str, Any], limit: float | None) -> str:
    """Of all episodes, where what one task has too much of makes up for what another lacks."""
    value = report["imagined_success"] - report["true_success"]
    return _measured(signed(value), _points(report.get("imagined_minus_true_interval")), _beyond(abs(value), limit))


def _task_difference(report: Mapping[str, Any], limit: float | None) -> str:
    value = report["delta_success"]
    return _measured(f"{100 * value:.0f}", None, _beyond(value, limit))


def _beyond(value: float, limit: float | None) -> bool:
    return limit is not None and value > limit


def _points(ends: Sequence[float] | None) -> str | None:
    return None if ends is None else f"{100 * ends[0]:.0f}, {100 * ends[1]:.0f}".replace("-", "&minus;")


def _measured(value: str, ends: str | None, short: bool | None) -> str:
    """``short``: whether it misses its threshold; None: no threshold is for it."""
    soft = f' <span class="soft">[{ends}]</span>' if ends else ""
    return (value if short is None else f'<span class="{"bad" if short else "good"}">{value}</span>') + soft


def _psnr(report: Mapping[str, Any]) -> str:
    """After the most chunks; red where the images are no better than a copy after any number of them."""
    return _measured(_beside_copy(report, "psnr", 1.0), None, better_than_copy(report) is not True)


def _beside_copy(report: Mapping[str, Any], name: str, unit: float) -> str:
    ours, copy = report[name][-1], report[f"copy_{name}"][-1]
    return ABSENT if ours is None or copy is None else f"{unit * ours:.1f}, {unit * copy:.1f}"


def _validation(run: RunData) -> str:
    """Success of each round's policies in the real environment."""
    rows, steps = [], 0
    for number, one in enumerate(run.rounds):
        steps += one.stages.get("record", {}).get("control_steps", 0)  # none where there is no simulator
        for name, title in VALIDATED.items():
            if name in one.stages:
                rate = rate_cell(Rate.of(one.stages[name]))
                rows.append(
                    f'<tr><td>round {number}, {title}</td><td class="n">{rate}</td><td class="n">{steps:,}</td></tr>'
                )
    if not rows:
        return ""
    head = '<tr><th>policy</th><th class="n">success</th><th class="n">recorded control steps</th></tr>'
    note = "On validation starts, which nothing is trained on. The best policy is shipped."
    return (
        '<div class="card"><h3>Validation in the real environment</h3>'
        f'<div class="wide"><table>{head}{"".join(rows)}</table></div><p class="note">{note}</p></div>'
    )


def _success(rounds: Sequence[Round]) -> str:
    lines = [
        line
        for number, one in enumerate(rounds)
        for line in curve(series(one.metrics, "success"), label=f"round {number}", color=number % PALETTE)
    ]
    return success_figure("Success of imagined episodes", lines)


def _videos(rounds: Sequence[Round]) -> str:
    """Of the latest round that has some."""
    last = next((one for one in reversed(rounds) if one.videos), None)
    if last is None:
        return ""
    report = last.stages.get("evaluate_model", {})
    divergence = report.get("divergence", {})
    note = "Above the recording, below the prediction for the same actions; swapped: actions of another episode."
    if divergence:
        note += (
            " The line between them turns red in the first frame in which they diverge: the mean difference of all "
            f"pixels exceeds {report['reference_image_difference']:.1f} of 255, which at most 5 % of single "
            "predictions from recorded observations do, or the object is 2 cm away from its true place."
        )
    cards = "".join(
        f'<div class="card">{video(path, escape(name.replace("_", " ")) + _diverged(divergence.get(name)))}</div>'
        for name, path in last.videos.items()
    )
    return f'<h2>Recorded and imagined</h2><p class="note">{note}</p><div class="videos">{cards}</div>'


def _diverged(divergence: Mapping[str, Any] | None) -> str:
    if divergence is None:
        return ""
    if divergence["step"] is None:
        return ": do not diverge"
    return f": diverge after {divergence['step']} control steps ({divergence['reason']})"
