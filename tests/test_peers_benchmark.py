"""The benchmark beside other libraries: arguments, equal work, and our side of it in toy size."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest

from benchmarks import tables
from benchmarks.peers.__main__ import parse, rows, written
from benchmarks.peers.ours import algorithm, run
from benchmarks.peers.pace import Finished, Measured, Pace
from benchmarks.peers.work import DIFFUSION, FLOW, GAUSSIAN, TOY, Work
from vla_rl.bench.record import RESULTS, read_record, write_record


def test_arguments() -> None:
    chosen = parse(["--dppo", "there", "--only", "dppo", "--rounds", "2"])
    assert (chosen.dppo, chosen.only, chosen.rounds, chosen.scale) == (Path("there"), ["dppo"], 2, 1.0)
    assert chosen.out == RESULTS != parse(["--toy"]).out  # which is no measurement


@pytest.mark.parametrize("arguments", [["--rounds", "0"], ["--scale", "2"], ["--only", "nobody"]])
def test_wrong_arguments_end_with_2(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(arguments)
    assert error.value.code == 2


def test_the_sizes_are_those_that_the_peers_publish() -> None:
    sizes = {work.kind: (work.control_steps, work.gradient_steps) for work in (DIFFUSION, FLOW, GAUSSIAN)}
    assert sizes == {"diffusion": (80_000, 20), "flow": (80_000, 5), "gaussian": (2_048, 320)}
    assert DIFFUSION.minibatch * DIFFUSION.trained_steps == 50_000


@pytest.mark.parametrize("work", [DIFFUSION, FLOW])
def test_a_scaled_work_takes_as_many_gradient_steps(work: Work) -> None:
    for scale in (0.05, 0.1, 0.5):
        assert work.scaled(scale).gradient_steps == work.gradient_steps
        assert algorithm(work.scaled(scale)).update.minibatch == work.scaled(scale).minibatch


@pytest.mark.parametrize("work", [GAUSSIAN, DIFFUSION, FLOW], ids=lambda work: work.kind)
def test_our_side_runs(work: Work) -> None:
    pytest.importorskip("imageio", reason="Gymnasium's Hopper imports it")
    small = dataclasses.replace(work, **TOY, hidden=tuple(8 for _ in work.hidden), critic_hidden=(8,))
    answers = io.StringIO()
    with pytest.raises(Finished):
        run(Pace(io.StringIO("\n\n"), answers), small)
    measured = [Measured(**json.loads(line)) for line in answers.getvalue().splitlines()]
    assert [one.gradient_steps for one in measured] == [small.gradient_steps] * 2
    assert all(one.rollout_s > 0 and one.update_s > 0 and one.update_cpu_s > 0 for one in measured)


def test_comparisons_that_are_not_measured_again_stay_in_the_record(tmp_path: Path) -> None:
    one = Measured(rollout_s=1, update_s=1, rollout_cpu_s=1, update_cpu_s=1, gradient_steps=1)
    earlier = {"scale": 1.0, "peers": {"cleanrl": "abc", "gym": "0.2"}}
    write_record("peers", rows("cleanrl", GAUSSIAN, [one], [one]), command="first", folder=tmp_path, **earlier)
    first = read_record("peers", tmp_path)
    found = rows("dppo", DIFFUSION, [one], [one])
    written(found, parse(["--scale", "0.5", "--out", str(tmp_path)]), {"dppo": "def", "gym": "0.3"}, "second")
    record = read_record("peers", tmp_path)
    assert (record["command"], record["scale"]) == ("second", 0.5)
    assert record["peers"] == {"cleanrl": "abc", "dppo": "def", "gym": "0.3"}
    assert [row["against"] for row in record["rows"]] == ["cleanrl"] * 6 + ["dppo"] * 6
    assert [row.get("measured", {}).get("command") for row in record["rows"]] == ["first"] * 6 + [None] * 6
    assert record["rows"][0] | {"measured": None} == first["rows"][0] | {"measured": None}


def test_of_a_library_that_is_not_measured_again_the_version_that_was(tmp_path: Path) -> None:
    """It is installed in another version meanwhile."""
    one = Measured(rollout_s=1, update_s=1, rollout_cpu_s=1, update_cpu_s=1, gradient_steps=1)
    chosen = parse(["--out", str(tmp_path)])
    written(rows("stable-baselines3", GAUSSIAN, [one], [one]), chosen, {"stable-baselines3": "2.8"}, "first")
    written(rows("dppo", DIFFUSION, [one], [one]), chosen, {"stable-baselines3": "2.9", "dppo": "def"}, "second")
    assert read_record("peers", tmp_path)["peers"] == {"stable-baselines3": "2.8", "dppo": "def"}
    written(rows("stable-baselines3", GAUSSIAN, [one], [one]), chosen, {"stable-baselines3": "2.9"}, "third")
    assert read_record("peers", tmp_path)["peers"] == {"stable-baselines3": "2.9", "dppo": "def"}


def test_the_table_says_the_rounds_and_loads_of_every_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = Measured(rollout_s=1, update_s=1, rollout_cpu_s=1, update_cpu_s=1, gradient_steps=1)
    chosen = parse(["--out", str(tmp_path)])
    written(rows("dppo", DIFFUSION, [one] * 2, [one] * 2), chosen, {}, "first")
    written(rows("cleanrl", GAUSSIAN, [one] * 5, [one] * 5), chosen, {}, "second")
    record = read_record("peers", tmp_path)
    record["machine"]["load"] = [3.0]
    for row in record["rows"][:6]:
        row["measured"]["machine"]["load"] = [6.0]
    monkeypatch.setattr(tables, "read_record", lambda name: record)
    assert "Medians of 2 and 5 pairs" in tables.peers()
    assert "load of the machine 6 and 3." in tables.peers()


def test_ratios_are_of_neighbouring_iterations() -> None:
    def measured(rollout: float, update: float) -> Measured:
        return Measured(
            rollout_s=rollout, update_s=update, rollout_cpu_s=rollout, update_cpu_s=update, gradient_steps=1
        )

    found = {one["name"]: one for one in rows("x", GAUSSIAN, [measured(1, 1)] * 3, [measured(1, n) for n in (1, 3, 7)])}
    assert found["x, iteration, wall time"]["ratio"] == 0.5
    assert found["x, iteration, wall time"]["interval"] == [0.25, 1.0]
    assert found["x, update, processor time"]["theirs"] == 3
