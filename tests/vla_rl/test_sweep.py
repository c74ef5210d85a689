"""Sweeps: real runs of a small state-only experiment, real Optuna, SIGKILL."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from policies.bundle import save_bundle
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from sims.errors import UserError, is_disk_full
from sims.tabletop import TabletopConfig
from tests.vla_rl.scale_run import numbers
from tests.vla_rl.test_report import check
from vla_rl.cli.main import main
from vla_rl.cli.training import Sweep
from vla_rl.config.environments import make_env
from vla_rl.config.errors import ConfigError
from vla_rl.config.loader import load_config, save_config
from vla_rl.report import write_sweep_page
from vla_rl.report.table import print_sweep
from vla_rl.runners.train import train
from vla_rl.runs.run_dir import SWEEP_FILE, read_stages
from vla_rl.sweep.config import Pruning, Range, SweepConfig
from vla_rl.sweep.space import MOST_CORNERS, Space
from vla_rl.sweep.study import Pruned, open_trials
from vla_rl.sweep.sweep import EXPERIMENT_FILE, check_folder, check_sweep, load_space, sweep

CONFIG = """
seed: 3
device: cpu
sim: {name: tabletop, tasks: [reach], num_envs: 2, max_steps: 12, cameras: [], reward: shaped}
start: {name: bundle, path: start}
algorithm:
  name: ppo
  iterations: 3
  chunks: 2
  critic_warmup: 1
  update: {minibatch: 4, micro_batch: 4, epochs: 1}
evaluation: {episodes: 2, validation_episodes: 2, validate_every: 1, videos_per_task: 0}
checkpoint_every: 2
"""
SWEEP = """
settings:
  algorithm.update.learning_rate: {low: 1.0e-4, high: 1.0e-2, log: true}
  algorithm.update.epochs: {low: 1, high: 3}
  algorithm.gae_lambda: [0.9, 0.95]
trials: 3
seeds: [0]
"""

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sweep")
    env = make_env(TabletopConfig(tasks=("reach",), num_envs=2, max_steps=12, cameras=()))
    torch.manual_seed(0)
    save_bundle(
        GaussianPolicy(GaussianPolicyConfig(action_horizon=4, hidden=(8,)), RobotSpec.of(env.spec)), folder / "start"
    )
    env.close()
    (folder / "config.yaml").write_text(CONFIG)
    return folder / "config.yaml"


def space_of(config: Path, folder: Path, text: str) -> Space:
    file = folder / "sweep.yaml"
    file.write_text(text)
    return load_space(config, (), file)


def test_a_failed_trial_is_recorded_and_the_sweep_goes_on(config: Path, tmp_path: Path) -> None:
    text = "settings: {algorithm.update.clip_high: [0.2, 1.0e+39]}\ntrials: 4\nsampler_seed: 1"
    result = sweep(space_of(config, tmp_path, text), tmp_path / "sweep", resume=False, command="vla-rl sweep")
    states = {row["settings"]["algorithm.update.clip_high"]: row["state"] for row in result["trials"]}
    assert states == {0.2: "complete", 1e39: "failed"} and len(result["trials"]) == 2  # each value once
    assert [row["state"] for row in result["trials"]] == sorted(row["state"] for row in result["trials"])
    failed = result["trials"][-1]
    assert re.search(r"^RuntimeError: .*overflow", failed["message"]), failed
    assert "Traceback" in (tmp_path / "sweep" / failed["runs"][0] / "traceback.txt").read_text()
    assert failed["message"] in check(tmp_path / "sweep" / "sweep.html").text
    again = sweep(space_of(config, tmp_path, text), tmp_path / "sweep", resume=True, command="vla-rl sweep")
    assert again == result


def test_settings_of_one_last_name_have_titles_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = {"algorithm.update.learning_rate": 1e-4, "start.bc.learning_rate": 1e-3, "algorithm.chunks": 2}
    trial = {"state": "complete", "value": 0.5, "settings": settings, "message": "", "seconds": 3.0, "curve": [0.5]}
    values = {name: [value, 2 * value] for name, value in settings.items()}
    result = {"objective": "validation", "settings": values, "trials": [trial | {"trial": i} for i in range(2)]}
    print_sweep(result)
    words = capsys.readouterr().out.splitlines()[0].split()
    assert words[2:6] == ["validation", "update.learning_rate", "bc.learning_rate", "chunks"]
    shown = check(write_sweep_page(result | {"command": "vla-rl sweep"}, tmp_path / "sweep.html")).text
    assert "objectiveupdate.learning_ratebc.learning_ratechunkswall time" in shown


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("settings: {algorithm.update.learning_rat: [1.0]}", "did you mean 'algorithm.update.learning_rate'"),
        ("settings: {algorithm.gae_lambda: {low: 0.5, high: 1.5}}", "gae_lambda 1.5.*must be a number from 0 to 1"),
        ("settings: {algorithm.chunks: {low: 1.5, high: 4}}", "must be an integer"),
        ("settings: {algorithm.update.epochs: {low: 3, high: 1}}", r"low \(3\) must be below high"),
        ("settings: {algorithm.gae_lambda: {low: 0, high: 1, log: true}}", "low must be above 0"),
        ("settings: {algorithm.update.micro_batch: [2, 3]}", "multiple of micro_batch"),
        ("settings: {algorithm.update.frozen: [encoder]}", "must be"),
        ("settings: {seed: [1, 2]}", "seed must be the same in all trials"),
        ("settings: {evaluation.seed: [1, 2]}", "must be the same in all trials"),
        ("settings: {}", "names no setting"),
        ("trials: 3", "'settings' is required"),
        ("settings: {algorithm.chunks: [1, 2]}\nobjective: success", "objective must be one of validation, .*held-out"),
        ("settings: {algorithm.chunks: [1, 2]}\nfinal_validations: 4", "a run is validated 3 times"),
        ("settings: {algorithm.chunks: [1, 2]}\nseeds: []", "at least"),
    ],
)
def test_wrong_settings_are_refused_before_anything_runs(config: Path, tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_sweep(space_of(config, tmp_path, text))


def test_an_objective_of_a_task_without_validation_episodes_is_refused(tmp_path: Path) -> None:
    env = make_env(TabletopConfig(tasks=("reach", "push"), num_envs=2, max_steps=12, cameras=()))
    env.close()
    save_bundle(GaussianPolicy(GaussianPolicyConfig(), RobotSpec.of(env.spec)), tmp_path / "start")
    (tmp_path / "config.yaml").write_text(CONFIG.replace("[reach]", "[reach, push]"))
    file = tmp_path / "sweep.yaml"
    file.write_text("settings: {algorithm.chunks: [1, 2]}\nobjective: validation/push")
    check_sweep(load_space(tmp_path / "config.yaml", (), file))
    overrides = ("--evaluation.validation_episodes", "1")
    with pytest.raises(UserError, match=r"no episode of push; set .*validation_episodes to at least 2, got 1"):
        check_sweep(load_space(tmp_path / "config.yaml", overrides, file))


@pytest.mark.parametrize(
    "text", ["3", "fast", "[[1]]", "{low: 1, high: 2, step: 1}", "{low: a, high: 2}", "{low: 1}", "{1: 2}"]
)
def test_values_of_another_form_are_one_line(config: Path, tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as error:
        space_of(config, tmp_path, f"settings: {{algorithm.chunks: {text}}}")
    words = r"must be \{low, high, log\} or a list, each .* or null, none twice, at least 1, got .*"
    assert re.fullmatch(rf"sweep\.yaml: 'settings\.algorithm\.chunks' {words} \(line 1\)", str(error.value))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("--seed", "7"), "--seed: .* set seeds in the file of the sweep"),
        (("--algorithm.gae-lambda=0.9", "--algorithm.chunks=3"), "--algorithm.chunks: the sweep searches it"),
    ],
)
def test_an_override_that_no_trial_would_have_is_refused(
    config: Path, tmp_path: Path, overrides: tuple[str, ...], message: str
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("settings: {algorithm.chunks: [1, 2]}")
    with pytest.raises(UserError, match=message):
        load_space(config, overrides, file).check()


def test_relative_paths_among_the_choices_are_of_the_folder_of_the_sweep_file(config: Path, tmp_path: Path) -> None:
    space = space_of(config, tmp_path, "settings: {start.path: [one, ../two], algorithm.chunks: {low: 1, high: 2}}")
    chosen = [settings["start.path"] for settings in space.each_value()]
    assert chosen == [str(tmp_path / "one"), str(tmp_path.parent / "two")]
    assert space.config.settings["algorithm.chunks"] == Range(low=1, high=2)


@pytest.mark.parametrize(
    "overrides", ["--checkpoint_every 1", "--sim.threads 1", "--cluster.collectors 1", "--compile true", "--trace 1"]
)
def test_a_sweep_resumes_with_settings_on_which_results_do_not_depend(
    config: Path, tmp_path: Path, overrides: str
) -> None:
    file = tmp_path / "sweep.yaml"
    file.write_text("settings: {algorithm.gae_lambda: [0.9, 0.95]}")
    started = load_space(config, (), file)
    (tmp_path / "sweep").mkdir()
    save_config(started.config, tmp_path / "sweep" / SWEEP_FILE)
    save_config(started.experiment({}, 0), tmp_path / "sweep" / EXPERIMENT_FILE)
    wanted = load_space(config, overrides.split(), file)
    check_folder(tmp_path / "sweep", wanted, wanted.experiment({}, 0), resume=True)
    for refused in ("algorithm.iterations 4", "evaluation.validate_every 2", "sim.max_steps 13"):
        other = load_space(config, f"--{refused}".split(), file)
        name = refused.split()[0]
        with pytest.raises(UserError, match=rf"{name} was \d+, is \d+\..*only these may change: trials, budget_hours"):
            check_folder(tmp_path / "sweep", other, other.experiment({}, 0), resume=True)


def test_many_combinations_are_sampled_and_each_value_occurs(config: Path) -> None:
    settings = {f"setting_{i}": tuple(range(4)) for i in range(5)} | {"last": Range(low=0, high=9)}
    space = Space(file=config, overrides=(), config=SweepConfig(settings=settings))
    corners = list(space.corners())
    assert len(corners) == len({tuple(one.values()) for one in corners}) == MOST_CORNERS
    for name in settings:
        assert {one[name] for one in space.each_value()} == {one[name] for one in corners}


def test_the_median_pruner_ends_a_trial_where_an_interrupted_one_ended(config: Path, tmp_path: Path) -> None:
    space = space_of(config, tmp_path, SWEEP)
    searched = SweepConfig(settings=space.config.settings, pruning=Pruning(startup_trials=2, warmup=1))
    experiment = space.experiment(next(space.corners()), 0)
    with open_trials(tmp_path, searched, experiment) as trials:
        for level in (0.4, 0.6):
            number = trials.begin()
            trials.report(number, [level] * 3)
            trials.end(number, "complete", value=level)
        number = trials.begin()
        trials.report(number, [0.1])
    with open_trials(tmp_path, searched, experiment) as trials:  # as after a kill
        assert trials.unfinished() == number == 2
        with pytest.raises(Pruned, match="after 2 validations"):
            trials.report(number, [0.1, 0.1, 0.9])
        with pytest.raises(Pruned, match="after 2 validations"):
            trials.report(number, [0.1, 0.1])
        trials.end(number, "pruned", message="slow")
        assert trials.unfinished() is None
        records = trials.records()
    assert [(row["state"], row["value"]) for row in records] == [("complete", 0.4), ("complete", 0.6), ("pruned", 0.1)]
    assert records[2]["curve"] == [0.1, 0.1]
    assert all(1e-4 <= row["settings"]["algorithm.update.learning_rate"] <= 1e-2 for row in records)


def test_the_budget_ends_a_sweep_between_trials(config: Path, tmp_path: Path) -> None:
    text = "settings: {algorithm.gae_lambda: [0.9, 1.0]}\ntrials: 9\nbudget_hours: 1.0e-6"
    result = sweep(space_of(config, tmp_path, text), tmp_path / "sweep", resume=False, command="vla-rl sweep")
    assert [row["state"] for row in result["trials"]] == ["complete"]


def test_a_sweep_that_is_not_named_is_the_packaged_one_of_the_experiment() -> None:
    named, unnamed = Sweep(Path("quickstart"), Path("quickstart")), Sweep(Path("quickstart"))
    assert unnamed.space_file() == named.space_file()
    assert unnamed.run_folder() == named.run_folder() == Path("runs/sweep-quickstart")
    assert unnamed.command() == named.command()


def test_the_packaged_sweep_loads() -> None:
    config = load_config(SweepConfig, Path(__file__).parents[2] / "configs" / "sweeps" / "quickstart.yaml")
    Space(file=Path(__file__).parents[2] / "configs" / "quickstart.yaml", overrides=(), config=config).check()


@pytest.mark.slow
def test_a_killed_sweep_goes_on_as_if_it_had_not_been(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    space = space_of(config, tmp_path, SWEEP)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    arguments = ["sweep", str(config), str(tmp_path / "sweep.yaml"), "--run-dir", str(killed), "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen([sys.executable, "-m", "vla_rl.cli", *arguments], env=environment) as process:
        second = killed / "trial_001" / "seed_0" / "metrics.jsonl"
        while not second.exists() and process.poll() is None:
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert not (killed / "trial_002").exists()
    first = (killed / "trial_000" / "seed_0" / "metrics.jsonl").stat().st_mtime_ns
    main([*arguments, "--resume"])
    resumed = json.loads(capsys.readouterr().out)
    assert (killed / "trial_000" / "seed_0" / "metrics.jsonl").stat().st_mtime_ns == first
    expected = sweep(space, whole, resume=False, command="vla-rl sweep")
    kept = ("trial", "state", "value", "settings", "curve", "runs")
    assert [{key: row[key] for key in kept} for row in resumed["trials"]] == [
        {key: row[key] for key in kept} for row in expected["trials"]
    ]
    assert [row["state"] for row in resumed["trials"]] == ["complete"] * 3
    for row in expected["trials"]:
        assert len(numbers(whole / row["runs"][0])) == 3
        assert numbers(killed / row["runs"][0]) == numbers(whole / row["runs"][0])
    assert json.loads((killed / "sweep.json").read_text()) == resumed
    page = check(killed / "sweep.html")
    for text in ("3 complete", "learning_rate", "Objective of each trial", "looks better than it is"):
        assert text in page.text, text
    finish_a_trial(space, whole / "trial_001" / "seed_0", expected)
    changed = space_of(config, tmp_path, SWEEP.replace("[0.9, 0.95]", "[0.9, 1.0]"))
    with pytest.raises(UserError, match=r"settings.algorithm.gae_lambda was"):
        sweep(changed, whole, resume=True, command="")


def finish_a_trial(space: Space, run_dir: Path, result: dict) -> None:
    """It is an ordinary run, whose held-out starts have not been used."""
    assert set(read_stages(run_dir)) == {"imitate", "reinforce"}
    before = numbers(run_dir)
    settings = next(row["settings"] for row in result["trials"] if row["trial"] == 1)
    outcome = train(space.experiment(settings, 0), run_dir, resume=True, command="vla-rl train")
    assert outcome["rl"]["episodes"] == 2
    assert numbers(run_dir) == before
    assert (run_dir / "report.html").exists()


def test_a_full_disk_that_the_study_meets_is_told_from_other_errors() -> None:
    with closing(sqlite3.connect(":memory:")) as study:
        study.execute("CREATE TABLE trials (name TEXT)")
        study.execute("PRAGMA max_page_count = 2")
        with pytest.raises(sqlite3.OperationalError, match="full") as full:
            study.execute("INSERT INTO trials VALUES (?)", ("x" * 100_000,))
        with pytest.raises(sqlite3.OperationalError, match="no such table") as other:
            study.execute("SELECT * FROM none")
    assert is_disk_full(full.value)
    assert not is_disk_full(other.value)
