"""``vla-rl eval --suite all`` prints the table of LIBERO's publications."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

from policies.bundle import BundleError, load_bundle, read_bundle_info, save_bundle
from policies.device import CPU
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from sims.adapters.gymnasium import Gymnasium
from sims.adapters.libero import LiberoConfig
from sims.errors import UserError
from sims.numbers.statistics import wilson_interval
from sims.registry import score_table
from sims.subproc.vector_env import SubprocVectorEnv
from tests.sims.point_maze import MazesConfig
from vla_rl.cli.training import Eval
from vla_rl.config.environments import ENVIRONMENTS
from vla_rl.config.experiment import Experiment
from vla_rl.report.table import print_evaluation
from vla_rl.runners.evaluate import BundleEvaluation, evaluate_path, join_suites

SCORES = {"libero_spatial": 8, "libero_object": 9, "libero_goal": 7, "libero_10": 4}


def result(suite: str, wins: int) -> dict[str, Any]:
    """Ten episodes of one task."""
    rate = {"success": wins / 10, "interval": list(wilson_interval(wins, 10))}
    return {
        **rate, "episodes": 10, "per_task": {"pick it up": {**rate, "episodes": 10}}, "mean_steps": 100.0,
        "stochastic": {**rate, "success": wins / 20}, "simulator": suite, "seed": 0, "split": "standard",
        "words": "given", "fingerprint": {},
    }  # fmt: skip


def test_four_suites_in_the_published_layout(capsys: pytest.CaptureFixture[str]) -> None:
    joined = join_suites([result(suite, wins) for suite, wins in SCORES.items()])
    assert joined["success"] == 0.7
    assert joined["interval"] == list(wilson_interval(28, 40))
    assert joined["episodes"] == 40
    assert joined["stochastic"]["success"] == 0.35
    assert joined["per_task"]["libero_goal: pick it up"]["success"] == 0.7
    success = {suite: wins / 10 for suite, wins in SCORES.items()}
    print_evaluation(joined | {"score_table": score_table(LiberoConfig(), success)})
    header, _, values = capsys.readouterr().out.splitlines()[-3:]
    assert [cell.strip() for cell in header.split("|")] == ["Spatial", "Object", "Goal", "Long", "Average"]
    assert [cell.strip() for cell in values.split("|")] == ["80.0", "90.0", "70.0", "40.0", "70.0"]


def test_results_of_perturbed_suites_have_no_average() -> None:
    table = score_table(LiberoConfig(), {f"{suite}_swap": wins / 10 for suite, wins in SCORES.items()})
    assert table is not None
    header = table.splitlines()[0]
    assert header.count("_swap") == 4
    assert "Average" not in header


def test_what_is_not_under_the_protocol_has_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without LIBERO; of one task or with other time limits it is no score of the suite."""
    monkeypatch.setattr("vla_rl.runners.evaluate.evaluate_in", lambda sim, *_, **__: result(sim.suite, 8))
    evaluate = partial(evaluate_path, tmp_path, episodes=10, split=None, seed=0)
    experiment = Experiment(sim=LiberoConfig(tasks=(0,), max_steps=100), device="cpu")
    assert "score_table" not in evaluate(experiment=experiment)
    assert "score_table" not in evaluate(experiment=experiment, suites=("spatial",))
    standard = partial(evaluate, experiment=experiment, protocol="standard")
    assert "score_table" not in standard(control="blank_instruction")
    assert "Spatial" in standard()["score_table"]


def test_suites_are_checked_before_the_first_is_evaluated_and_reported_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(cast(Any, ENVIRONMENTS), MazesConfig, partial(SubprocVectorEnv, simulator=Gymnasium))
    sim = MazesConfig(
        id="tests.sims.point_maze:PointMaze-v0", state=("robot.position", "goal"), num_envs=2, max_steps=4
    )
    robot = RobotSpec(action_dim=2, state_dim=4, cameras=(), image_size=(0, 0), control_hz=5.0)
    save_bundle(GaussianPolicy(GaussianPolicyConfig(action_horizon=2), robot), tmp_path / "bundle")
    finished: list[dict[str, Any]] = []
    evaluate = partial(
        evaluate_path, tmp_path / "bundle", split=None, seed=0, experiment=Experiment(sim=sim, device="cpu"),
        finished=finished.append,
    )  # fmt: skip
    with pytest.raises(UserError, match="short has two starts"):
        evaluate(episodes=3, suites=("whole", "short"))
    with pytest.raises(UserError, match="PointMaze-v00"):
        evaluate(episodes=2, suites=("whole", "broken"))
    assert finished == []
    loads: list[Path] = []
    monkeypatch.setattr(
        "vla_rl.runners.evaluate.load_bundle", lambda path, **given: loads.append(path) or load_bundle(path, **given)
    )
    joined = evaluate(episodes=2, suites=("whole", "short"))
    assert [one["episodes"] for one in finished] == [2, 2]
    assert joined["episodes"] == 4
    assert loads == [tmp_path / "bundle"]  # for both suites, checked and evaluated
    assert {one["weights"] for one in finished} == {read_bundle_info(tmp_path / "bundle").sha256}


def test_a_bundle_of_another_robot_is_refused_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    robot = RobotSpec(action_dim=2, state_dim=4, cameras=(), image_size=(0, 0), control_hz=5.0)
    save_bundle(GaussianPolicy(GaussianPolicyConfig(action_horizon=2), robot), tmp_path / "bundle")
    asked = BundleEvaluation(bundle=tmp_path / "bundle", device=CPU, episodes=1, seed=0, control="none")
    policy = asked.policy(robot)
    assert asked.policy(robot) is policy
    monkeypatch.setattr("vla_rl.runners.evaluate.load_bundle", lambda path, **given: pytest.fail("it was loaded"))
    for one in (asked, replace(asked)):
        with pytest.raises(BundleError, match="was made for another robot or simulator: "):
            one.policy(replace(robot, action_dim=3))


@pytest.mark.parametrize("as_json", [False, True])
def test_each_suite_is_shown_on_standard_error(capsys: pytest.CaptureFixture[str], as_json: bool) -> None:
    Eval(path=Path("run"), json=as_json)._show_suite(result("libero_goal", 7))
    shown = capsys.readouterr()
    name, first, *_ = shown.err.splitlines()
    assert (shown.out, name) == ("", "libero_goal:")
    assert json.loads(first)["success"] == 0.7 if as_json else first.split()[0] == "task"


def test_error_for_a_simulator_without_suites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.yaml").write_text("sim: {name: tabletop}\n")
    (tmp_path / "bundle").mkdir()
    monkeypatch.setattr("vla_rl.runners.evaluate.load_bundle", lambda path: None)
    with pytest.raises(UserError, match="tabletop has no evaluation suites, got all"):
        evaluate_path(tmp_path, episodes=1, split=None, seed=0, suites=("all",))
