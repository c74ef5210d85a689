"""The benchmark beside other libraries: arguments, equal work, and our side of it in toy size."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path

import pytest

from benchmarks.peers.__main__ import parse, rows
from benchmarks.peers.ours import algorithm, run
from benchmarks.peers.pace import Finished, Measured, Pace
from benchmarks.peers.work import DIFFUSION, FLOW, GAUSSIAN, TOY, Work


def test_arguments() -> None:
    chosen = parse(["--dppo", "there", "--only", "dppo", "--rounds", "2"])
    assert (chosen.dppo, chosen.only, chosen.rounds, chosen.scale) == (Path("there"), ["dppo"], 2, 1.0)


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


def test_ratios_are_of_neighbouring_iterations() -> None:
    def measured(rollout: float, update: float) -> Measured:
        return Measured(
            rollout_s=rollout, update_s=update, rollout_cpu_s=rollout, update_cpu_s=update, gradient_steps=1
        )

    found = {one["name"]: one for one in rows("x", GAUSSIAN, [measured(1, 1)] * 3, [measured(1, n) for n in (1, 3, 7)])}
    assert found["x, iteration, wall time"]["ratio"] == 0.5
    assert found["x, iteration, wall time"]["interval"] == [0.25, 1.0]
    assert found["x, update, processor time"]["theirs"] == 3
