"""Learning curves: one configuration, several seeds, what came out.

    python -m benchmarks.learning quickstart --seeds 0 1 2 --evaluation.control_episodes 200
    python -m benchmarks.learning quickstart_grpo --from runs/learning/quickstart-0/imitation/bundle

Runs ``vla-rl train configs/NAME.yaml`` once per seed (--section.key VALUE overrides any setting) and writes
benchmarks/results/learning_NAME.json (without a leading "tabletop_"): success before and after on held-out starts,
which differ between seeds, deployed and stochastic, per task, under controls and on other splits; means over seeds
with intervals over seeds and episodes (sims/numbers/statistics.py); of each run the curve, the seconds and the command.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import yaml

from benchmarks.seeds import seeds_interval
from vla_rl.bench.record import Row, row, write_record
from vla_rl.runs.metrics import read_metrics

ROOT = Path(__file__).parents[1]
CURVE = ("success", "validation", "kl", "explained_variance")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a configuration in configs/, without .yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--from", dest="bundle", help="start from this bundle instead of imitation")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "learning")
    arguments, settings = parser.parse_known_args()
    if arguments.bundle:
        if "start" in yaml.safe_load((ROOT / "configs" / f"{arguments.name}.yaml").read_text()):
            parser.error(f"{arguments.name}.yaml has a section start of its own, which --from would replace as a whole")
        settings += ["--start.name", "bundle", "--start.path", arguments.bundle]
    runs = [one_run(arguments.name, seed, settings, arguments.runs) for seed in arguments.seeds]
    command = "python -m benchmarks.learning " + " ".join(sys.argv[1:])
    print(
        write_record(f"learning_{arguments.name.removeprefix('tabletop_')}", rows_of(runs), command=command, runs=runs)
    )


def one_run(name: str, seed: int, settings: list[str], runs: Path) -> dict[str, Any]:
    """Train (or resume) and read what it left."""
    run_dir = runs / f"{name}-{seed}"
    place = os.path.relpath(run_dir, ROOT)
    command = ["vla-rl", "train", f"configs/{name}.yaml", "--seed", str(seed), *settings, "--run-dir", place]
    resume = ["--resume"] if (run_dir / "config.yaml").exists() else []
    subprocess.run([sys.executable, "-m", "vla_rl.cli", *command[1:], *resume], cwd=ROOT, check=True)
    result = json.loads((run_dir / "result.json").read_text())
    return {
        "seed": seed,
        "command": " ".join(command),
        **{key: result[key] for key in ("bc", "rl", "stochastic", "controls", "splits") if key in result},
        "wall_s": result["wall_s"],
        "curve": [{k: r[k] for k in ("iteration", *CURVE) if k in r} for r in read_metrics(run_dir)],
    }


def vla_rl(*words: object) -> str:
    """What the command prints on standard output, its last line."""
    command = [sys.executable, "-m", "vla_rl.cli", *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE)
    return done.stdout.rstrip().rpartition("\n")[2]


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Means over seeds: every kind of success, per task, under each control and on each other split."""
    rows = [mean_row(f"{kind} success", runs, kind) for kind in ("bc", "rl", "stochastic")]
    for kind in ("bc", "rl"):
        rows += [
            mean_row(f"{kind} success, {task}", runs, kind, "per_task", task) for task in runs[0][kind]["per_task"]
        ]
    for key in ("controls", "splits"):
        measured = [name for name, summary in runs[0].get(key, {}).items() if summary is not None]
        rows += [mean_row(f"rl success, {name}", runs, key, name) for name in measured]
    return rows


def mean_row(name: str, runs: Sequence[Mapping[str, Any]], *path: str) -> Row:
    summaries = [reduce(getitem, path, run) for run in runs]
    values, episodes = [one["success"] for one in summaries], [one["episodes"] for one in summaries]
    wins = [round(value * count) for value, count in zip(values, episodes, strict=True)]
    seeds = [run["seed"] for run in runs]
    interval = list(seeds_interval(wins, episodes))
    return row(
        name, statistics.mean(values), "1", interval=interval, seeds=seeds, values=values, episodes=sum(episodes)
    )


if __name__ == "__main__":
    main()
