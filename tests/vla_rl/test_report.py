from __future__ import annotations

import errno
import hashlib
import json
import os
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from sims.errors import UserError
from tests.vla_rl.command import answer, vla_rl
from tests.vla_rl.run_folder import TASKS, make_imagined_run, make_run, rate
from vla_rl.cli.main import main
from vla_rl.report import write_comparison, write_report
from vla_rl.report.aggregates import groups
from vla_rl.report.comparison import unique_names
from vla_rl.report.page import stage_seconds
from vla_rl.report.pieces import duration
from vla_rl.report.run_data import Rate, difference, read_run
from vla_rl.report.svg import Line, line_chart, smooth, stacked_area, thinned, ticks
from vla_rl.report.table import comparison, group_rows, print_bench, print_comparison, print_evaluation, print_runs
from vla_rl.runners.evaluate import EpisodeResults
from vla_rl.runs.listing import list_runs, summarize
from vla_rl.runs.tracked import track_run

VOID = {"meta", "br"}


class Checker(HTMLParser):
    """Counts tags, gathers text, and insists that every element is closed in order and nothing is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.labels: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "poster", "action"):
                assert (value or "").startswith("data:"), (tag, name, value)
            if name == "aria-label":
                self.labels.append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def check(page: Path) -> Checker:
    html = page.read_text(encoding="utf-8")
    assert not re.search(r"https?:|url\(|@import|<script|nan", html.replace("NaN", "nan"))
    checker = Checker()
    checker.feed(html)
    assert checker.open == []
    return checker


def test_a_complete_run_shows_every_section(tmp_path: Path):
    page = check(write_report(make_run(tmp_path / "quickstart")))
    for text in ("41 %", "78 %", "+37", "20 min", "interval excludes zero", *TASKS):
        assert text in page.text, text
    for text in ("vla-rl train configs/quickstart.yaml --seed 0", "clip_ratio: 0.2", "2.13.0", "policy_loss"):
        assert text in page.text, text
    assert page.tags.count("video") == 4
    titles = [label.partition(".")[0] for label in page.labels]
    for title in ("Success", "KL to the rollout's policy", "Value: explained variance", "Seconds per iteration"):
        assert title in titles, title


def test_the_time_of_an_iteration_by_stage(tmp_path: Path):
    run = make_run(tmp_path / "run", videos=False)
    rows = [
        {"iteration": 0, "wall_s": 1.0, "time/learn_s": 3.0, "time/simulate_s": 1.0, "time/idle_s": 0.0},
        {"iteration": 1, "wall_s": 2.0, "time/learn_s": 1.0, "time/simulate_s": 1.0, "time/validate_s": 2.0},
    ]
    rows[1] |= {"collectors/infer_s": 0.5}
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read_run(run)
    assert list(stage_seconds(data, "time/").items()) == [("simulate", 1.0), ("learn", 2.0), ("validate", 1.0)]
    assert stage_seconds(data, "collectors/") == {"infer": 0.25}
    page = check(write_report(run))
    for text in ("An iteration", "learn2 s50 %", "An iteration of a collector", "infer0.25 s100 %"):
        assert text in page.text, text


def test_the_world_models_evaluation_is_shown_round_by_round(tmp_path: Path):
    html = write_report(make_imagined_run(tmp_path / "run"))
    page, text = check(html), html.read_text()
    for shown in (
        '<span class="bad">39 %</span> <span class="soft">[0, 60]</span>',
        '<span class="good">0 %</span>',
        '<span class="bad">0.71</span> <span class="soft">[0.66, 0.76]</span>',
        '<span class="good">&minus;5</span> <span class="soft">[&minus;12, 2]</span>',
    ):
        assert shown in text, shown
    for text in ("38.5, 51.1", "22.0, 12.0", "round 1, after imagined training", "24,000", "swapped 0"):
        assert text in page.text, text
    assert page.tags.count("video") == 1
    assert "Success of imagined episodes" in {label.partition(".")[0] for label in page.labels}


def test_what_halves_imagined_episodes_is_red_and_nothing_else(tmp_path: Path):
    run = make_imagined_run(tmp_path / "run")
    stages = json.loads((run / "stages.json").read_text())
    for number in (0, 1):
        matched = {"length_matched_auc": 0.85, "length_matched_auc_interval": [0.8, 0.9], "length_matched_pairs": 200}
        stages[f"evaluate_model_{number}"] |= matched
    stages["evaluate_model_0"] |= {"success_auc": 0.7, "success_auc_interval": [0.6, 0.8], "copy_psnr": [24.5, 12.0]}
    (run / "stages.json").write_text(json.dumps(stages))
    text = write_report(run).read_text()
    for shown in (
        '<td class="n">0.70 <span class="soft">[0.60, 0.80]</span></td>',
        '<span class="good">0.85</span> <span class="soft">[0.80, 0.90]</span>',
        '<span class="bad">22.0, 12.0</span>',
        '<span class="good">22.0, 12.0</span>',
    ):
        assert shown in text, shown


def test_what_was_not_measured_and_what_tasks_hide_from_each_other_is_red(tmp_path: Path):
    run = make_imagined_run(tmp_path / "run")
    stages = json.loads((run / "stages.json").read_text())
    stages["evaluate_model_1"] |= {"hallucinated_success": None, "delta_success": 0.31, "recorded_auc": 0.88}
    (run / "stages.json").write_text(json.dumps(stages))
    text = write_report(run).read_text()
    for shown in (
        '<span class="bad">not measured</span>',
        '<span class="good">5</span>',
        '<span class="bad">31</span>',
        '<td class="n">0.88</td>',
    ):
        assert shown in text, shown


@pytest.mark.parametrize(("stop", "limit", "color"), [(0.7, "0.80", "good"), (0.95, "0.95", "bad")])
def test_an_auc_that_stops_the_training_is_red(tmp_path: Path, stop: float, limit: str, color: str):
    """Also where ``min_success_auc`` admits it: the second round's is .93."""
    run = make_imagined_run(tmp_path / "run")
    config = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("{max_hall", f"{{stop_below_auc: {stop}, max_hall"))
    html = write_report(run).read_text()
    assert f'<td>AUC of imagined success</td><td class="n">&ge; {limit}</td>' in html
    assert f'<span class="{color}">0.93</span>' in html


def test_iterations_in_imagination_count(tmp_path: Path):
    run = make_imagined_run(tmp_path / "run")
    assert read_run(run).iterations == summarize(run).iterations == 10


def test_a_round_that_has_just_started(tmp_path: Path):
    run = make_imagined_run(tmp_path / "run")
    stages = json.loads((run / "stages.json").read_text())
    (run / "stages.json").write_text(
        json.dumps({"validate_start": stages["validate_start"], "record_0": stages["record_0"]})
    )
    shutil.rmtree(run / "imagination")
    page = check(write_report(run))
    assert "Evaluation of the world model" not in page.text
    assert "78 %" in page.text


def test_a_gain_within_the_interval_is_called_noise(tmp_path: Path):
    page = check(write_report(make_run(tmp_path / "run", gain=0.02, videos=False)))
    assert "A change of +2 points" in page.text and "within the noise of this evaluation" in page.text
    page = check(write_report(make_run(tmp_path / "worse", gain=-0.02, videos=False)))
    assert "A change of -2 points" in page.text


@pytest.mark.parametrize(
    "missing",
    ["result.json", "metrics.jsonl", "config.yaml", "command.txt", "videos", "imitation", "videos/bc_lift_cube.mp4"],
)
def test_missing_files_leave_the_other_sections(tmp_path: Path, missing: str):
    run = make_run(tmp_path / "run")
    path = run / missing
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    page = check(write_report(run))
    if missing == "result.json":
        assert "No final evaluation yet: 80 iterations recorded so far." in page.text
    else:
        assert "78 %" in page.text


@pytest.mark.parametrize("iterations", [0, 1, 2])
def test_a_run_that_has_just_started(tmp_path: Path, iterations: int):
    run = make_run(tmp_path / "run", videos=False)
    (run / "result.json").unlink()
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:iterations]) + '{"iteration": 2, "wa')
    check(write_report(run))


def test_text_from_the_run_is_escaped(tmp_path: Path):
    run = make_run(tmp_path / "<b>run", videos=False)
    (run / "command.txt").write_text("vla-rl train '<script>alert(1)</script>'")
    result = json.loads((run / "result.json").read_text())
    result["rl"]["per_task"]["<i>task"] = rate(0.5, 50)
    (run / "result.json").write_text(json.dumps(result))
    page = check(write_report(run))
    assert "<script>alert(1)</script>" in page.text
    assert not {"b", "i", "script"} & set(page.tags)


def test_other_folders_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match="not the folder of a run"):
        write_report(tmp_path)
    run = make_run(tmp_path / "run", videos=False)
    (run / "result.json").write_text("{")
    with pytest.raises(UserError):
        write_report(run)


def test_the_list_of_runs_shows_whole_paths_where_there_is_little_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("vla_rl.report.table.for_stdout", lambda: Console(width=80))
    runs = [summarize(make_run(tmp_path / "a_long_name_of_a_folder" / f"seed_{i}", videos=False)) for i in range(2)]
    print_runs(runs)
    head, *lines = capsys.readouterr().out.splitlines()
    column = head.index("state")
    assert "".join(line[:column].strip() for line in lines) == "".join(run.path for run in runs)


def test_the_list_of_runs_says_where_its_success_is_that_of_a_validation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    stopped = make_run(tmp_path / "stopped", videos=False)
    (stopped / "result.json").unlink()
    print_runs([summarize(make_run(tmp_path / "finished", videos=False)), summarize(stopped)])
    _, finished, under_way = capsys.readouterr().out.splitlines()
    assert "% (validation)" in under_way and "validation" not in finished


def test_the_list_of_runs_is_a_line_per_run_in_a_pipe(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [summarize(make_run(tmp_path / "a_long_name_of_a_folder" / f"seed_{i}", videos=False)) for i in range(2)]
    print_runs(runs)
    _, *lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [run.path for run in runs]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.yaml", "seed: [3\n"),
        ("config.yaml", "[3]\n"),
        ("config.yaml", "seed: 3\nseed: 4\n"),
        ("result.json", "[]"),
        ("result.json", '{"rl": {}}'),
        ("result.json", '{"rl": {"success": 1.0, "interval": [0.5, 1.0], "per_task": {"reach": {"episodes": 1}}}}'),
        ("stages.json", "[]"),
        ("metrics.jsonl", '{"iteration": 0\n{"iteration": 1}\n'),
        ("metrics.jsonl", "5\n6\n"),
        ("metrics.jsonl", '{"wall_s": 5}\n'),
    ],
)
def test_a_damaged_file_is_named(tmp_path: Path, name: str, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    run, fine = (make_run(tmp_path / which, videos=False) for which in ("damaged", "fine"))
    (run / name).write_text(content)
    for arguments in (("report", run), ("compare", run, fine, "--out", tmp_path / "page.html")):
        ended = vla_rl(*arguments)
        assert ended.returncode == 2, ended.stderr
        assert str(run / name) in ended.stderr and ended.stderr.count("\n") == 1
    found = {Path(one.path).name: one for one in list_runs(tmp_path)}
    assert (found["fine"].state, found["fine"].damage) == ("finished", "")
    if name != "config.yaml":  # the list does not read it
        print_runs(list_runs(tmp_path))
        assert str(run / name) in capsys.readouterr().out
        assert found["damaged"].state == "damaged" and str(run / name) in found["damaged"].damage


def test_a_seed_counts_once(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, videos=False) for name in ("x", "y", "z")]
    for age, run in enumerate(runs):
        os.utime(run / "result.json", (1_000_000 - age, 1_000_000 - age))
    (group,) = groups([read_run(run) for run in runs])
    assert [run.path for run in group.runs] == [runs[0]] and group.rate is None
    assert group.name == f"all runs; of 3 runs with seed 0 the newest: {runs[0]}"
    assert f"of 3 runs with seed 0 the newest: {runs[0]}" in check(write_comparison(runs, tmp_path / "page.html")).text
    other = make_run(tmp_path / "other", seed=1, gain=0.2, videos=False)
    (row,) = answer("compare", *runs, other, "--json", "--out", tmp_path / "page.html")["groups"]
    assert row["runs"] == 2 and row["interval"][0] < row["interquartile_mean"] < row["interval"][1]


def test_a_task_without_episodes_has_no_success(tmp_path: Path) -> None:
    """Neither in a summary nor in a mean."""
    results = EpisodeResults(
        success=torch.tensor([True, True]), task=torch.tensor([0, 0]), steps=torch.tensor([5, 5], dtype=torch.int64)
    )
    summary = results.summary(["reach", "push"])
    assert summary["per_task"]["push"] == {"success": None, "interval": [0.0, 1.0], "episodes": 0}
    runs = [make_run(tmp_path / str(seed), seed=seed, videos=False) for seed in (0, 1)]
    for run in runs:
        result = json.loads((run / "result.json").read_text())
        (run / "result.json").write_text(json.dumps(result | {"rl": summary}))
    (group,) = groups([read_run(run) for run in runs])
    assert group.rate is not None and group.rate.success == 1.0
    page = check(write_comparison(runs, tmp_path / "page.html"))
    assert "reach" in page.text and "push" not in page.text


def test_runs_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    runs = [
        make_run(tmp_path / "a" / "run", videos=False),
        make_run(tmp_path / "b" / "run", seed=1, algorithm="grpo", gain=0.2, videos=False),
        make_run(tmp_path / "third", seed=2, videos=False),
    ]
    (runs[2] / "result.json").unlink()
    page = check(write_comparison(runs, tmp_path / "out" / "compare.html"))
    for text in ("a/run", "b/run", "third", "Settings that differ", "algorithm.name", "grpo", "+37", "+20"):
        assert text in page.text, text
    assert "clip_ratio" not in page.text
    print_comparison(runs)
    lines = [line.split()[0].rpartition("/")[0][-2:] for line in capsys.readouterr().out.splitlines()]
    assert lines[:4] == ["", "a", "b", ""]  # then the table of runs that differ in their seed


def test_runs_without_a_simulator_are_compared_by_what_they_imagine_and_say_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    runs = [make_run(tmp_path / f"logs_{seed}", seed=seed, videos=False) for seed in (0, 1)]
    for run in runs:
        imagined = {"before": rate(0.3, 64), "after": rate(0.8, 64)}
        (run / "result.json").write_text(json.dumps({"imagined": imagined, "wall_s": {"reinforce": 900.0}}))
    print_comparison(runs)
    text = capsys.readouterr().out
    assert "not finished" not in text
    assert text.count("30.0 %") == 2 and text.count("80.0 % imagined") == 3  # of both, and of them together
    row = comparison(runs)[0]
    assert (row["before"], row["after"]) == (None, None)  # no success but an imagined one
    assert row["imagined"]["after"]["success"] == 0.8
    assert check(write_comparison(runs, tmp_path / "compare.html")).text.count("imagined") == 3
    for run, success in zip(runs, (0.2, 0.9), strict=True):
        imagined = {"before": rate(0.1, 64), "after": rate(success, 64)}
        (run / "result.json").write_text(json.dumps({"imagined": imagined}))
    print_comparison(runs)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:3]] == ["logs_1", "logs_0"]  # best first
    (row,) = group_rows(runs)
    assert row["imagined"] and row["interquartile_mean"] == pytest.approx(0.55)
    known = [make_run(tmp_path / str(seed), seed=seed, videos=False) for seed in (0, 1)]
    assert not group_rows(known)[0]["imagined"]


@pytest.mark.parametrize(
    "path", ["runs/{start}_seed{seed}/bundle", "2026-11-1/{start}/pi0/seed{seed}/x", "v{version}/{seed}/pi0"]
)
def test_runs_that_start_from_the_bundle_of_their_seed_are_one_group(tmp_path: Path, path: str):
    """Also where another number of the path is the seed of one of them."""
    runs = [make_run(tmp_path / f"{start}-{seed}", seed=seed, videos=False) for start in "ab" for seed in (0, 1)]
    for run in runs:
        start, seed = run.name.split("-")
        with (run / "config.yaml").open("a") as file:
            bundle = path.format(start=start, version="ab".index(start), seed=seed)
            file.write(f"start:\n  name: bundle\n  path: {bundle}\n")
    found = groups([read_run(run) for run in runs])
    assert [[run.path.name for run in group.runs] for group in found] == [["a-0", "a-1"], ["b-0", "b-1"]]


@pytest.mark.parametrize(
    "setting", ["sim.workers", "checkpoint_every", "cluster.collectors", "evaluation.videos_per_task"]
)
def test_runs_that_differ_in_what_results_do_not_depend_on_are_one_group(tmp_path: Path, setting: str):
    runs = [make_run(tmp_path / str(seed), seed=seed, videos=False) for seed in (0, 1)]
    for number, run in enumerate(runs):
        config, keys = yaml.safe_load((run / "config.yaml").read_text()), setting.split(".")
        section = config.setdefault(keys[0], {}) if len(keys) > 1 else config
        section[keys[-1]] = 1 + number
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    assert [len(group.runs) for group in groups([read_run(run) for run in runs])] == [2]


@pytest.mark.parametrize("imagined", [3, {}, {"before": {"success": 0.5}, "after": {"success": 0.5}}])
def test_a_damaged_success_in_a_world_model_is_one_message(tmp_path: Path, imagined: object):
    run = make_run(tmp_path / "one", videos=False)
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"imagined": imagined}))
    with pytest.raises(UserError, match=r"result\.json is damaged"):
        read_run(run)


def test_groups_that_differ_in_many_settings_are_named_by_the_algorithm_and_a_few(tmp_path: Path):
    runs = [make_run(tmp_path / f"ppo-{seed}", seed=seed, videos=False) for seed in (0, 1)]
    runs += [make_run(tmp_path / name, algorithm="off_policy", videos=False) for name in ("b", "c")]
    for number, run in enumerate(runs):
        own = {f"setting_{i}": number // 2 for i in range(60)} if number >= 2 else {"chunks": 8}
        config = yaml.safe_load((run / "config.yaml").read_text())
        config["sim"]["num_envs"] = 16 if number < 2 else 8
        config["algorithm"] |= own | ({"only_here": 1} if number == 3 else {})
        (run / "config.yaml").write_text(yaml.safe_dump(config))
    found = groups([read_run(run) for run in runs])
    assert [len(group.runs) for group in found] == [2, 1, 1]
    assert found[0].name == "algorithm.name ppo, sim.num_envs 16, and 62 more settings"
    few = "algorithm.name off_policy, sim.num_envs 8, and 62 more settings"
    assert [group.name for group in found[1:]] == [f"b: {few}", f"c: {few}"]
    alike = groups([read_run(run) for run in runs[:3:2]])
    assert [group.name for group in alike][1] == "algorithm.name off_policy, sim.num_envs 8, and 61 more settings"


def test_tables_on_the_terminal(capsys: pytest.CaptureFixture[str]):
    result = rate(0.625, 80) | {"per_task": {"lift [cube]": rate(0.625, 80)}, "stochastic": rate(0.5, 80)}
    print_evaluation(result)
    row = {"name": "sim", "value": 1234.5, "unit": "steps/s", "ratio": 2.5, "against": "one process"}
    print_bench({"bench": "sim", "rows": [row, {"name": "b", "value": 1, "unit": "s"}]})
    text = capsys.readouterr().out
    assert re.search(r"lift \[cube\] +62\.5 % +52 to 72 % +80", text)
    assert re.search(r"sim +1234 +steps/s +2\.5 +one process", text)


def test_difference_is_newcombes():
    """Newcombe 1998, Table II, example (a): 56/70 - 48/80, method 10, is 0.0524 to 0.3339."""
    before, after = (Rate.of(rate(k / n, n)) for k, n in ((48, 80), (56, 70)))
    assert difference(before, after) == pytest.approx((0.2, 0.0524, 0.3339), abs=2e-4)


@given(st.floats(-1e4, 1e4), st.floats(1e-2, 1e6), st.integers(2, 8))
def test_ticks_are_inside_the_range_and_evenly_spaced(low: float, span: float, count: int):
    high = low + span
    values = ticks(low, high, count)
    assert all(low - 1e-6 * span <= value <= high + 1e-6 * span for value in values)
    assert len(values) <= count + 1
    steps = [(b - a) / span for a, b in pairwise(values)]
    assert not steps or max(steps) - min(steps) < 1e-6


def test_ticks_by_hand():
    assert ticks(0, 1) == [0, 0.2, 0.4, 0.6, 0.8, 1]
    assert ticks(3, 97) == [20, 40, 60, 80]
    assert ticks(2, 2) == [2]


def test_smoothing_keeps_a_straight_line_and_averages_noise():
    line = [(float(i), 2.0 * i) for i in range(9)]
    assert smooth(line, 3)[1:-1] == line[1:-1]
    assert smooth([(0, 0.0), (1, 3.0), (2, 0.0)], 3)[1] == (1, 1.0)


def test_smoothing_is_the_mean_of_the_points_around():
    noise = random.Random(0)
    points = [(float(i), noise.gauss(0.0, 1.0)) for i in range(5_000)]
    averages = smooth(points, 401)
    for i in (0, 150, 200, 2_500, 4_999):
        near = [y for _, y in points[max(0, i - 200) : i + 201]]
        assert averages[i] == (float(i), pytest.approx(sum(near) / len(near), abs=1e-9))


def test_a_long_curve_is_drawn_in_as_many_points_as_the_chart_is_wide_and_keeps_its_peaks():
    values = [0.5] * 100_000
    values[77_777], values[77_779] = 1.0, 0.0
    points = thinned([(float(i), value) for i, value in enumerate(values)])
    assert len(points) <= 2 * 480 and {(77_777.0, 1.0), (77_779.0, 0.0)} <= set(points)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    assert thinned(points[:480]) == points[:480]


def test_the_charts_of_a_long_run_are_small():
    seconds = {name: [(float(i), 1.0) for i in range(100_000)] for name in ("collect", "update")}
    area = stacked_area(seconds, title="t")
    checked = [(float(i), 0.5) for i in range(1, 2_001)]
    line = Line(label="validation", points=checked, color=0, interval=[(0.4, 0.6)] * len(checked))
    assert "circle" not in line_chart([line], title="t")
    few = Line(label="validation", points=checked[:20], color=0, interval=[(0.4, 0.6)] * 20)
    assert line_chart([few], title="t").count("circle") == 20
    assert len(area) < 60_000 and "collect: 1 s per iteration on average" in area and "on average 2 s" in area


def test_points_are_drawn_at_their_coordinates():
    chart = line_chart([Line(label="a", points=[(0, 0.0), (10, 1.0)], color=0)], title="t", y=(0.0, 1.0))
    start, end = re.search(r'd="M([\d. ]+)L([\d. ]+)"', chart).groups()
    assert start == "52.0 212.0"  # left edge, bottom
    assert end == "466.0 12.0"  # right edge, top


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.4, "0 s"),
        (59.7, "1 min 00 s"),
        (200, "3 min 20 s"),
        (1195, "20 min"),
        (7500, "2 h 05 min"),
        (3599, "1 h 00 min"),
    ],
)
def test_durations(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_real_browser_lays_the_page_out_without_overflow(tmp_path: Path):
    page = write_report(make_run(tmp_path / "run"))
    figures = "document.documentElement.scrollWidth, innerWidth, document.querySelectorAll('svg').length"
    probe = f"<script>document.title = [{figures}]</script></body>"
    page.write_text(page.read_text().replace("</body>", probe))
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    options += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        ["chromium", *options, "--window-size=500,900", "--dump-dom", page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"<title>(\d+),(\d+),(\d+)</title>", done.stdout)
    assert found is not None, done.stderr[-500:]
    wide, window, charts = map(int, found.groups())
    assert wide <= window
    assert charts >= 8


def test_runs_of_one_name_are_told_apart_however_long_their_paths_are(tmp_path: Path, capsys) -> None:
    deep = tmp_path / ("long" * 20)
    runs = [make_run(deep / which / "run", videos=False) for which in ("first", "second")]
    assert unique_names([read_run(run) for run in runs]) == ["first/run", "second/run"]
    print_comparison(runs)
    printed = capsys.readouterr().out
    assert "first/run" in printed
    assert "second/run" in printed


def test_tracked_runs_are_small_and_are_compared_as_the_runs_are(tmp_path: Path, capsys) -> None:
    runs = [make_run(tmp_path / "runs" / name, seed=seed) for seed, name in enumerate(("one", "two"))]
    (runs[0] / "bundle").mkdir()
    (runs[0] / "bundle" / "bundle.json").write_text('{"sha256": "0"}')
    (runs[0] / "bundle" / "policy-0.safetensors").write_bytes(b"weights")
    main(["track", *map(str, runs), "--out", str(tmp_path / "tracked"), "--json"])
    copies = [Path(row["folder"]) for row in json.loads(capsys.readouterr().out)["runs"]]
    assert copies == [tmp_path / "tracked" / "one", tmp_path / "tracked" / "two"]
    assert (copies[0] / "bundle/bundle.json").exists() and not list(copies[0].rglob("*.safetensors"))
    assert not list(copies[0].rglob("*.mp4"))
    hashes = json.loads((copies[0] / "files.json").read_text())
    assert hashes["result.json"] == hashlib.sha256((runs[0] / "result.json").read_bytes()).hexdigest()
    for run, copy in zip(runs, copies, strict=True):
        one, other = read_run(run), read_run(copy)
        assert (one.metrics, one.imitation, one.result, one.settings) == (
            other.metrics, other.imitation, other.result, other.settings
        )  # fmt: skip
    assert write_comparison(copies, tmp_path / "page.html").exists()
    (runs[0] / "result.json").write_text("{}")
    assert track_run(runs[0], tmp_path / "tracked")["files"] == len(hashes)  # in place of the first copy
    (runs[1] / "result.json").unlink()
    with pytest.raises(UserError, match=r"two has no result.json: .*--resume"):
        track_run(runs[1], tmp_path / "tracked")
    (tmp_path / "taken" / "one").mkdir(parents=True)
    with pytest.raises(UserError, match="is no copy of a run; choose another --out"):
        track_run(runs[0], tmp_path / "taken")


def test_a_run_is_tracked_into_a_folder_above_it_and_never_into_itself(tmp_path: Path) -> None:
    run = make_run(tmp_path / "runs" / "one", videos=False)
    copied = track_run(run, tmp_path)
    assert copied["files"] > 3
    for one in (run, Path(copied["folder"])):
        with pytest.raises(UserError, match="would be replaced by its copy"):
            track_run(one, one.parent)


def test_a_copy_that_was_interrupted_leaves_the_earlier_one_and_the_next_succeeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, out = make_run(tmp_path / "run", videos=False), tmp_path / "tracked"
    copied = track_run(run, out)
    write = Path.write_bytes

    def full(path: Path, data: bytes) -> int:
        if path.name == "result.json":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, data)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        with pytest.raises(OSError, match="No space left"):
            track_run(run, out)
    assert (out / "run" / "result.json").exists() and (out / "run" / "files.json").exists()
    assert track_run(run, out) == copied
    assert [path.name for path in out.iterdir()] == ["run"]


def test_a_run_is_tracked_from_inside_its_folder_without_its_own_copies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(make_run(tmp_path / "run", videos=False))
    copied = track_run(Path(), Path("tracked"))
    assert track_run(Path(), Path("tracked")) == copied
