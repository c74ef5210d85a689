"""What collectors and asynchrony gain in wall-clock time, on a machine with nothing else to do.

    python -m benchmarks.ray_speed [--iterations 12] [--envs 64] [--chunks 16]

PPO on the quick start's four tasks, with its policy untrained and the rollouts of its size, in four shards. The same
iterations with one collector and with two, synchronous and with ``staleness: 1``. Speed is iterations per second
without the first two (processes start, and an asynchronous run has nothing to overlap yet). One thread for each
process. ``collecting``: the seconds of a rollout alone, which is what more collectors can shorten. ``achieved /
attainable`` is of ``vla-rl bench train`` on the quick start, in one process. On N cores a learner and two collectors
share N: see the number of cores in the record. About five minutes on two idle cores; a machine with other load measures
the load. Writes benchmarks/results/ray_speed.json.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.bench.record import Row, row, write_record
from vla_rl.runs.metrics import read_metrics

FIRST = 2  # iterations that are not measured
ROOT = Path(__file__).parents[1]


def train(run: Path, options: argparse.Namespace, *, collectors: int, staleness: int) -> float:
    """``speed`` of a run with such collectors, in the folder ``run``."""
    settings: dict[str, Any] = {
        "run-dir": run, "device": "cpu", "start.episodes": 4, "start.equal_shares": "false", "start.bc.steps": 2,
        "sim.num_envs": options.envs, "sim.threads": 1, "algorithm.iterations": options.iterations,
        "algorithm.chunks": options.chunks,
        "algorithm.rollout_shards": 4, "algorithm.staleness": staleness, "evaluation.episodes": 4,
        "evaluation.validate_every": 0, "evaluation.videos_per_task": 0, "cluster": "auto",
        "cluster.collectors": collectors, "cluster.threads": 1, "cluster.cpus": 0.5,
    }  # fmt: skip
    command = [sys.executable, "-m", "vla_rl.cli", "train", "quickstart"]
    for name, value in settings.items():
        command += [f"--{name}", str(value)]
    subprocess.run(command, cwd=ROOT, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    return speed(run)


def speed(run: Path) -> float:
    """Iterations per second without the start."""
    wall = [line["wall_s"] for line in read_metrics(run)]
    return (len(wall) - FIRST) / (wall[-1] - wall[FIRST - 1])


def collecting_s(run: Path) -> float:
    """Mean seconds of a rollout in a collector."""
    stages = [f"collectors/{name}_s" for name in ("simulate", "render", "encode", "infer")]
    return float(np.mean([sum(line[stage] for stage in stages) for line in read_metrics(run)[FIRST:]]))


def attainable() -> Row:
    """The last figure of ``vla-rl bench train``."""
    import json

    command = [sys.executable, "-m", "vla_rl.cli", "bench", "train", "--config", "quickstart", "--json"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = next(one for one in json.loads(printed)["rows"] if one["name"] == "achieved / attainable")
    return row("achieved / attainable", found["value"], "share", against="0.85, one process")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=16)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        found, collecting = {}, {}
        for collectors, staleness in ((1, 0), (2, 0), (1, 1), (2, 1)):
            run = Path(name) / f"{collectors}_{staleness}"
            found[collectors, staleness] = train(run, options, collectors=collectors, staleness=staleness)
            collecting[collectors, staleness] = collecting_s(run)
    one = found[1, 0]
    rows = [
        row("collecting, 2 collectors", collecting[1, 0] / collecting[2, 0], "x", against="1.7 x, 1 collector"),
        row("iterations, 2 collectors", found[2, 0] / one, "x", against="1 collector"),
        row("asynchronous, 1 collector", found[1, 1] / one, "x", against="1.3 x, synchronous, 1 collector"),
        row("asynchronous, 2 collectors", found[2, 1] / found[2, 0], "x", against="synchronous, 2 collectors"),
        row("iterations per second", one, "1/s", against="1 collector, synchronous"),
        attainable(),
    ]
    write_record("ray_speed", rows, command="python -m benchmarks.ray_speed " + " ".join(sys.argv[1:]))
    for each in rows:
        print(f"{each['name']:28} {each['value']:8.3f} {each['unit']:6} {each['against'] or ''}")


if __name__ == "__main__":
    main()
