"""What collectors and asynchrony gain in wall-clock time, on a machine with nothing else to do.

    python -m benchmarks.ray_speed [--only PPO RLPD] [--iterations 12] [--envs 64] [--chunks 16] [--repeats 3]

PPO on the quick start's four tasks, with its policy untrained and the rollouts of its size, in four shards. The same
iterations with one collector and with two, synchronous and with ``staleness: 1``. Speed is iterations per second
without the first two (processes start, and an asynchronous run has nothing to overlap yet). One thread for each
process. ``collecting``: the seconds of a rollout alone, which is what more collectors can shorten. ``achieved /
attainable`` is of ``vla-rl bench train`` on the quick start, in one process. On N cores a learner and two collectors
share N: see the number of cores in the record. About five minutes on two idle cores; a machine with other load measures
the load.

RLPD (configs/off_policy/rlpd.yaml, with images) of as many environments in one shard, one actor and the learner,
synchronous and with ``staleness: 1``, with an update for each fourth chunk of an environment and for each eighth.
Synchronous and asynchronous runs take turns, ``repeats`` times; a figure is the quotient of the medians, ``values`` are
those of the pairs, ``load`` the load averages after each pair. Learner and actor have a core each: where other work has
the cores too, and this a higher priority, Linux may leave both on one. What one iteration acts and what it learns, in
turns, are rows too: (acting + learning) / max(acting, learning) is all that can be gained. Writes
benchmarks/results/ray.json; --only leaves the rows of the other in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.bench.record import Row, add_to_record, read_record, row
from vla_rl.runs.metrics import read_metrics

FIRST = 2  # iterations that are not measured
ROOT = Path(__file__).parents[1]


def train(run: Path, config: str, settings: Mapping[str, Any], *, pinned: bool = False) -> float:
    """``speed`` of a run of ``config`` with these settings, in the folder ``run``."""
    common: dict[str, Any] = {
        "run-dir": run, "device": "cpu", "sim.threads": 1, "start.episodes": 4, "start.equal_shares": "false",
        "start.missing_tasks": "skip", "start.bc.steps": 2, "evaluation.episodes": 4, "evaluation.validate_every": 0,
        "evaluation.videos_per_task": 0, "cluster": "auto", "cluster.threads": 1, "cluster.cpus": 0.5,
    }  # fmt: skip
    command = [sys.executable, "-m", "vla_rl.cli", "train", config]
    for name, value in {**common, **settings}.items():
        command += [f"--{name}", str(value)]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=one_thread, stdout=subprocess.DEVNULL) as process:
        if pinned:
            pin(process, run)
    if process.returncode:
        raise SystemExit(f"the run in {run} ended with exit code {process.returncode}")
    return speed(run)


def pin(learner: subprocess.Popen[bytes], run: Path) -> None:
    """The learner to the first core and its collectors, which must be there, to the second, once these have started."""
    log = run / "cluster.jsonl"
    while not log.exists():
        if learner.poll() is not None:
            return
        time.sleep(0.1)
    pids = [json.loads(line)["pid"] for line in log.read_text().splitlines()]
    first, second = sorted(os.sched_getaffinity(0))[:2]
    for core, pid in ((first, learner.pid), *((second, pid) for pid in pids)):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(thread.name), {core})


def size(options: argparse.Namespace) -> dict[str, Any]:
    return {
        "sim.num_envs": options.envs,
        "algorithm.iterations": options.iterations,
        "algorithm.chunks": options.chunks,
    }


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
    command = [sys.executable, "-m", "vla_rl.cli", "bench", "train", "--config", "quickstart", "--json"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = next(one for one in json.loads(printed)["rows"] if one["name"] == "achieved / attainable")
    return row("achieved / attainable", found["value"], "share", against="0.85, one process")


def ppo(options: argparse.Namespace, folder: Path) -> list[Row]:
    found, collecting = {}, {}
    for collectors, staleness in ((1, 0), (2, 0), (1, 1), (2, 1)):
        run, settings = folder / f"{collectors}_{staleness}", size(options) | {"algorithm.rollout_shards": 4}
        settings |= {"cluster.collectors": collectors, "algorithm.staleness": staleness}
        found[collectors, staleness] = train(run, "quickstart", settings)
        collecting[collectors, staleness] = collecting_s(run)
    one = found[1, 0]
    return [
        row("speed-up of 2 collectors", collecting[1, 0] / collecting[2, 0], "x", against="1.7 x, 1 collector"),
        row("iterations, 2 collectors", found[2, 0] / one, "x", against="1 collector"),
        row("asynchronous speed-up", found[1, 1] / one, "x", against="1.3 x, synchronous, 1 collector"),
        row("asynchronous speed-up, 2 collectors", found[2, 1] / found[2, 0], "x", against="synchronous, 2 collectors"),
        row("iterations per second", one, "1/s", against="1 collector, synchronous"),
        attainable(),
    ]


def rlpd(options: argparse.Namespace, folder: Path) -> list[Row]:
    rows = []
    for chunks in (4, 8):
        pairs, load, own = [], [], []
        for repeat in range(options.repeats):
            pair = []
            for staleness in (0, 1):
                run = folder / f"rlpd_{chunks}_{repeat}_{staleness}"
                settings = size(options) | {
                    "algorithm.utd_ratio": 1 / chunks, "algorithm.warmup": options.envs * options.chunks,
                    "algorithm.staleness": staleness, "cluster.collectors": 1,
                }  # fmt: skip
                pair.append(train(run, "configs/off_policy/rlpd.yaml", settings, pinned=True))
            pairs.append(pair)
            load.append(os.getloadavg()[0])
            own.append([mean_s(folder / f"rlpd_{chunks}_{repeat}_0", f"time/{stage}_s") for stage in ("idle", "learn")])
        synchronous, asynchronous = np.median(pairs, axis=0)
        name = f"RLPD, 1 update for {chunks} chunks"
        rows += [
            row(
                f"{name}, asynchronous", asynchronous / synchronous, "x", against="1.3 x, synchronous",
                values=[after / before for before, after in pairs], load=load,
            ),
            row(f"{name}, iterations per second", synchronous, "1/s", against="synchronous"),
            *(
                row(f"{name}, {what}", seconds, "s", against="iteration, synchronous")
                for what, seconds in zip(("acting", "learning"), np.median(own, axis=0), strict=True)
            ),
        ]  # fmt: skip
    return rows


def mean_s(run: Path, stage: str) -> float:
    return float(np.mean([line[stage] for line in read_metrics(run)[FIRST:]]))


METHODS: Mapping[str, Callable[[argparse.Namespace, Path], list[Row]]] = {"PPO": ppo, "RLPD": rlpd}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--envs", type=int, default=64)
    parser.add_argument("--chunks", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        rows = [made for method in options.only for made in METHODS[method](options, Path(name))]
    add_to_record("ray", rows, command="python -m benchmarks.ray_speed " + " ".join(sys.argv[1:]))
    for each in read_record("ray")["rows"]:
        print(f"{each['name']:44} {each['value']:8.3f} {each['unit']:6} {each['against'] or ''}")


if __name__ == "__main__":
    main()
