"""How fast a run would be on 1 to 1024 GPUs, from the stage times of a small one; checked against two measured runs.

    python -m benchmarks.scaling_model [--iterations 12] [--envs 64] [--chunks 16]
    python -m benchmarks.scaling_model --runs ONE TWO

A model of events: when each process begins and ends each piece of work of an iteration. The pieces take what they took
in a measured run with one collector, drawn from its iterations, so that stragglers set a barrier as they do in truth.
Placements (docs/scaling.md):

* colocated: all GPUs collect, then all learn;
* disaggregated: a quarter of the GPUs learns, the others collect the next rollout meanwhile (staleness 1);
* pipelined: as colocated, with the environments of each GPU in two halves; one steps while the other is denoised.

Two laws are assumed and not measured: the work of a rollout is divided equally (``--fixed``: share of a collector's
time that does not shrink with its environments), and learners add a gradient of ``--gradient-mb`` by a ring over
``--link-gb-s``. First the model predicts the measured runs with one and with two collectors; the errors are rows.
``--runs``: folders of runs that were measured already, of one collector (or of one process), and of two where there is
such a run, otherwise alike; the stage times are those of the first, in its metrics.jsonl.
Writes benchmarks/results/scaling_model.json.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.ray_speed import FIRST, size, speed, train
from policies.bundle import read_bundle_info
from sims.errors import UserError
from vla_rl.bench.record import Row, row, write_record
from vla_rl.runs.metrics import read_metrics

Placement = Literal["colocated", "disaggregated", "pipelined"]
PLACEMENTS: tuple[Placement, ...] = ("colocated", "disaggregated", "pipelined")
GPUS = (1, 2, 4, 8, 16, 64, 256, 1024)
ROUNDS = 200


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Seconds per iteration of a run in one collector and one learner, [iterations] each.

    ``step``: simulate, render and the rest of the environments. ``infer``: encode and denoise. ``sync``: weights and
    rollouts. ``learn``: the update. ``micro_batches``: of a minibatch, which learners share.
    """

    step: np.ndarray
    infer: np.ndarray
    sync: np.ndarray
    learn: np.ndarray
    micro_batches: int = 1024


@dataclass(frozen=True, kw_only=True)
class Laws:
    """``fixed``: share of a collector's time that does not shrink. ``gradient_s``: to send one gradient once."""

    fixed: float = 0.0
    gradient_s: float = 0.0
    gradients: int = 0  # of an iteration

    def collect(self, seconds: np.ndarray, collectors: int) -> np.ndarray:
        return seconds * (self.fixed + (1 - self.fixed) / collectors)

    def learn(self, seconds: np.ndarray, learners: int, micro_batches: int) -> np.ndarray:
        """The largest number of micro-batches that one learner has, and a ring all-reduce of every gradient."""
        share = -(-micro_batches // min(learners, micro_batches)) / micro_batches
        return seconds * share + 2 * (learners - 1) / learners * self.gradient_s * self.gradients


def stages(records: Sequence[Mapping[str, Any]], micro_batches: int = 1024) -> Stages:
    """Of a run's metrics with one collector, on a cluster or in the run's own process. UserError: it is too short."""
    if len(records) <= FIRST:
        raise UserError(f"a run of {len(records)} iterations: the model needs more than {FIRST}, which it leaves out")

    def seconds(*names: str) -> np.ndarray:
        return np.array([sum(one.get(name, 0.0) for name in names) for one in records[FIRST:]])

    collects = "collectors" if "collectors/simulate_s" in records[-1] else "time"
    return Stages(
        step=seconds(f"{collects}/simulate_s", f"{collects}/render_s"),
        infer=seconds(f"{collects}/encode_s", f"{collects}/infer_s"),
        sync=seconds("collectors/sync_s", "time/sync_s"),
        learn=seconds("time/learn_s"),
        micro_batches=micro_batches,
    )


def iteration_s(stages: Stages, placement: Placement, collectors: int, learners: int, laws: Laws) -> float:
    """Mean seconds of an iteration, over ROUNDS after the first two."""
    rng = np.random.default_rng(0)
    drawn = rng.integers(len(stages.step), size=(ROUNDS, collectors))  # each collector's rollout is one that was seen
    step, infer = laws.collect(stages.step[drawn], collectors), laws.collect(stages.infer[drawn], collectors)
    # Two halves: each piece of one overlaps a piece of the other, but for the first.
    longer = np.maximum(step, infer)
    rollout = longer + np.minimum(step, infer) / 2 if placement == "pipelined" else step + infer
    of_learner = rng.integers(len(stages.learn), size=ROUNDS)
    learn = laws.learn(stages.learn[of_learner], learners, stages.micro_batches)
    sync = stages.sync[of_learner]
    return float(np.diff(ends(rollout, learn + sync, overlapped=placement == "disaggregated")[1:]).mean())


def ends(rollout: np.ndarray, update: np.ndarray, *, overlapped: bool) -> np.ndarray:
    """When each update ends. ``rollout`` [rounds, collectors] and ``update`` [rounds]: seconds.

    ``overlapped``: rollout r begins with the weights of update r - 2 (staleness 1), else with those of update r - 1.
    """
    free = np.zeros(rollout.shape[1])  # when each collector has ended its last rollout
    done = np.zeros(len(update) + 2)  # when update r - 2 has ended; the weights of the start are there at once
    for r, (each, seconds) in enumerate(zip(rollout, update, strict=True)):
        weights = done[r] if overlapped else done[r + 1]
        free = np.maximum(free, weights) + each
        done[r + 2] = max(free.max(), done[r + 1]) + seconds
    return done[2:]


def split(gpus: int, placement: Placement) -> tuple[int, int] | None:
    """Collectors and learners on so many GPUs; None where it takes more."""
    if placement != "disaggregated":
        return gpus, gpus
    return None if gpus < 2 else (gpus - max(1, gpus // 4), max(1, gpus // 4))


def predictions(measured: Stages, laws: Laws) -> list[Row]:
    rows = []
    for placement in PLACEMENTS:
        alone = iteration_s(measured, "colocated", 1, 1, laws)
        for gpus in GPUS:
            if (parts := split(gpus, placement)) is not None:
                speed = alone / iteration_s(measured, placement, *parts, laws)
                rows.append(row(f"{placement}, {gpus} GPUs", speed, "x", ratio=speed / gpus, against="one, colocated"))
    return rows


def check(runs: Sequence[Path], fixed: float) -> tuple[list[Row], Stages]:
    """The measured runs, of one collector and of two, beside what the model says, calibrated by the first of them."""
    measured = stages(read_metrics(runs[0]))
    rows = []
    for collectors, run in enumerate(runs, start=1):
        found, predicted = speed(run), 1 / iteration_s(measured, "colocated", collectors, 1, Laws(fixed=fixed))
        against = f"{found:.3f} iterations/s measured, {predicted:.3f} predicted"
        name = f"error of the model, {collectors} collector{'s' * (collectors > 1)}"
        rows.append(row(name, predicted / found - 1, "share", against=against))
    return rows, measured


def policy_mb(bundle: Path) -> float:
    return (bundle / read_bundle_info(bundle).tensors).stat().st_size / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, nargs="+", help="folders of one or two measured runs")
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--fixed", type=float, default=0.0)
    parser.add_argument("--gradient-mb", type=float, help="default: as large as the measured run's policy")
    parser.add_argument("--gradients", type=int, default=24, help="optimizer steps of an iteration")
    parser.add_argument("--link-gb-s", type=float, default=50.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = options.runs or [Path(name) / str(collectors) for collectors in (1, 2)]
        if not options.runs:
            for collectors, run in enumerate(runs, start=1):
                settings = size(options) | {"algorithm.rollout_shards": 4, "cluster.collectors": collectors}
                train(run, "quickstart", settings)
        checked, measured = check(runs[:2], options.fixed)
        gradient_mb = options.gradient_mb or policy_mb(runs[0] / "bundle")
    laws = Laws(fixed=options.fixed, gradient_s=gradient_mb / 1e3 / options.link_gb_s, gradients=options.gradients)
    rows = checked + predictions(measured, laws)
    write_record(
        "scaling_model",
        rows,
        setting={"gradient_mb": round(gradient_mb, 3)},
        command="python -m benchmarks.scaling_model " + " ".join(sys.argv[1:]),
    )
    for one in rows:
        print(f"{one['name']:36} {one['value']:9.3f} {one['unit']:6} {one['against'] or ''}")


if __name__ == "__main__":
    main()
