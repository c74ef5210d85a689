"""Records of benchmarks that are written again in part: earlier rows stay, with the call that measured them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmarks import off_policy, off_policy_methods, other_simulators, policies_learning
from sims.tabletop.config import TabletopConfig
from vla_rl.bench.record import Row, add_to_record, read_record, row, write_record
from vla_rl.config.experiment import Imitation

CALL = {"command", "date", "revision", "machine", "versions"}


def test_a_kept_row_has_the_call_that_measured_it(tmp_path: Path) -> None:
    """The first one through a second and a third call."""
    write_record("x", [row("a", 1.0, "s"), row("b", 2.0, "s")], command="first", folder=tmp_path)
    first = read_record("x", tmp_path)
    made = [row("a", 1.0, "s"), row("b", 3.0, "s"), row("c", 4.0, "s")]
    write_record("x", made, command="second", kept=["a"], folder=tmp_path)
    second = read_record("x", tmp_path)
    made = [*second["rows"][:2], row("c", 5.0, "s")]
    write_record("x", made, command="third", kept=["a", "b"], folder=tmp_path)
    third = read_record("x", tmp_path)
    assert third["command"] == "third"
    assert [one["value"] for one in third["rows"]] == [1.0, 3.0, 5.0]
    assert [one.get("measured") for one in third["rows"]] == [
        {key: first[key] for key in CALL},
        {key: second[key] for key in CALL},
        None,
    ]


def test_a_row_that_is_measured_again_has_the_record_s_own_call(tmp_path: Path) -> None:
    for command, kept in (("first", []), ("second", ["a"]), ("third", [])):
        write_record("x", [row("a", 1.0, "s")], command=command, kept=kept, folder=tmp_path)
    assert "measured" not in read_record("x", tmp_path)["rows"][0]


def test_what_is_added_to_a_record_leaves_its_other_rows_and_keys(tmp_path: Path) -> None:
    write_record("x", [row("a", 1.0, "s"), row("b", 2.0, "s")], command="first", folder=tmp_path, curves={"a": [1]})
    first = read_record("x", tmp_path)
    add_to_record("x", [row("b", 3.0, "s"), row("c", 4.0, "s")], command="second", folder=tmp_path)
    found = read_record("x", tmp_path)
    assert [(one["name"], one["value"]) for one in found["rows"]] == [("a", 1.0), ("b", 3.0), ("c", 4.0)]
    assert [one.get("measured") for one in found["rows"]] == [{key: first[key] for key in CALL}, None, None]
    assert (found["command"], found["curves"]) == ("second", {"a": [1]})
    add_to_record("x", [row("c", 5.0, "s")], command="third", folder=tmp_path, curves={})
    assert read_record("x", tmp_path)["curves"] == {}


def rows_again(record: Mapping[str, Any]) -> list[Row]:
    """From what the record holds of each run, as a call that measures other cases makes them."""
    if "runs" in record:
        return [one for name, runs in record["runs"].items() for one in other_simulators.rows_of(name, runs)]
    if "off_policy_methods" not in record["command"]:
        return [one for name, runs in record["curves"].items() for one in policies_learning.rows_of(name, runs)]
    arms = [(*name.split(", ", 1), runs) for name, runs in record["curves"].items()]
    return [one for comparison, arm, runs in arms for one in off_policy_methods.rows_of(comparison, arm, runs)]


@pytest.mark.parametrize("name", ["other_simulators", "off_policy_methods", "policies", "policies_cuda"])
def test_rows_that_a_partial_call_makes_again_are_those_of_the_record(name: str) -> None:
    record = read_record(name)
    rows = [one for one in record["rows"] if "difference" not in one["name"]]  # those are policies_reference's
    again = rows_again(record)
    assert [one["name"] for one in again] == [one["name"] for one in rows]
    for one, made in zip(rows, again, strict=True):
        assert made["value"] == pytest.approx(one["value"])
        assert made["seeds"] == one["seeds"]
        assert [made.get(cost) for cost in ("processor_s", "wall_s")] == [
            one.get(cost) for cost in ("processor_s", "wall_s")
        ]


def test_blank_images_are_of_the_runs_that_measured_them() -> None:
    summary = {"success": 0.5, "episodes": 10}
    stages = {"bc": summary, "rl": summary, "stochastic": summary, "control_steps": 100, "rl_s": 60.0}

    def blind(*controls: Mapping[str, Any]) -> list[Sequence[int]]:
        runs = [{**stages, "seed": seed, "controls": one} for seed, one in enumerate(controls)]
        rows = other_simulators.rows_of("x", runs)
        return [one["seeds"] for one in rows if one["name"] == "x, after PPO, blank images"]

    assert blind({"blank_images": summary}, {}, {"blank_images": summary}) == [[0, 2]]
    assert blind({"blank_images": None}, {}) == []


def test_both_sides_of_off_policy_learning_have_the_simulator_and_the_cloning_of_the_command_line() -> None:
    settings = ["--sim.action_delay", "1", "--sim.image_size=[48,48]", "--start.bc.steps", "200", "--seed", "4"]
    settings += ["--start.residual.scale", "0.2", "--algorithm.warmup", "10"]
    for arm in ("full", "ppo"):
        experiment = off_policy.experiment_of("resfit", arm, settings)
        sim, start = experiment.sim, experiment.start
        assert isinstance(sim, TabletopConfig) and isinstance(start, Imitation)
        assert (sim.tasks, sim.action_delay, sim.image_size, experiment.seed) == (("pick",), 1, (48, 48), 4)
        assert (start.episodes, start.bc.steps) == (25, 200)
        assert (start.residual is None) == (arm == "ppo")
