"""What a progress model of recorded episodes is worth on the tabletop suite: for cloning, and as a reward of PPO.

    OMP_NUM_THREADS=1 python -m benchmarks.progress --seeds 0 1 2

One model is fitted to 400 episodes of the quick start's demonstrator with its errors, half reach and half pick, and
evaluated on held-out ones. For each seed, 100 other successes are cloned with all windows alike, and by progress
(RA-BC); and from what was cloned alike, in a quarter of the updates, PPO learns by the outcome alone, and by the change
of progress besides: equal iterations and settings, none of them tuned for either. Success is the simulator's, on the
same held-out starts. Runs that are complete in --runs are not repeated. Writes benchmarks/results/progress.json.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.kept import keep_options
from benchmarks.learning import mean_row
from policies.device import CPU
from vla_rl.api import load_experiment
from vla_rl.bench.record import Row, row, write_record
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.config.packaged import PACKAGED
from vla_rl.rewards.progress.model import ProgressConfig
from vla_rl.runners.demonstrations import collect
from vla_rl.runners.evaluate import evaluate_path
from vla_rl.runners.imitation import imitate
from vla_rl.runners.progress import fit_progress
from vla_rl.runners.train import train
from vla_rl.runs.metrics import read_metrics

TASKS = ["--sim.tasks=[reach, pick]"]
REPORTED = ("value_order_correlation", "error", "blank_instruction", "failure_auc")
EPISODES = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--iterations", type=int, default=40, help="of PPO")
    parser.add_argument("--runs", type=Path, default=Path("runs/progress"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    report = fitted(arguments.runs)
    found = [run(seed, arguments.runs, arguments.iterations) for seed in arguments.seeds]
    command = "OMP_NUM_THREADS=1 python -m benchmarks.progress " + " ".join(sys.argv[1:])
    print(write_record("progress", rows_of(report, found), command=command.strip(), runs=found))


def rows_of(report: dict[str, Any], found: Sequence[dict[str, Any]]) -> list[Row]:
    rows = [row(f"progress model, {name.replace('_', ' ')}", report[name], "1") for name in REPORTED]
    high = report["high_failures"]
    rows.append(row("progress model, high failures", high["value"], "1", interval=high["interval"]))
    return rows + [mean_row(f"success, {arm}", found, arm) for arm in found[0] if arm not in ("seed", "curves")]


def experiment(*settings: str) -> Experiment:
    return load_experiment("quickstart", *TASKS, f"--evaluation.episodes={EPISODES}", *settings)


def fitted(runs: Path) -> dict[str, Any]:
    """The report of the model in ``runs``/model."""
    store = runs / "episodes"
    if not store.exists():
        collect(experiment("--seed=100"), episodes=400, out=store, failures=True)
    config = load_config(ProgressConfig, PACKAGED / "rewards" / "tabletop_progress.yaml", ["--steps=600"])
    return fit_progress(config, [store], runs / "model", seed=0, device=CPU)


def run(seed: int, runs: Path, iterations: int) -> dict[str, Any]:
    """Success of every arm, or what an earlier call found. UserError where that had other ``iterations``."""
    folder = runs / str(seed)
    done = folder / "result.json"
    keep_options(folder, {"iterations": iterations})
    if done.exists():
        found: dict[str, Any] = json.loads(done.read_text())
        return found
    store = folder / "demonstrations"
    if not store.exists():
        collect(experiment(f"--seed={seed}"), episodes=100, out=store)
    model = f"{(runs / 'model').absolute()}"
    found = {"seed": seed, "curves": {}}
    for arm, settings in {"cloned alike": [], "cloned by progress": [f"--start.bc.progress={model}"]}.items():
        given = experiment(f"--seed={seed}", *settings)
        bundle = imitate(given, folder / arm.replace(" ", "_"), store=store)
        result = evaluate_path(bundle, episodes=EPISODES, split=None, seed=None, experiment=given)
        found[arm] = summary(result)
        say(f"seed {seed}, {arm}: {found[arm]['success']:.3f}")
    base = imitate(experiment(f"--seed={seed}", "--start.bc.steps=200"), folder / "base", store=store)
    rewards = {"outcome": [], "progress": ["--reward.name=progress", f"--reward.path={model}"]}
    for reward, settings in rewards.items():
        place = folder / f"ppo_{reward}"
        given = experiment(
            f"--seed={seed}", "--start.name=bundle", f"--start.path={base.absolute()}",
            f"--algorithm.iterations={iterations}", "--evaluation.validate_every=0", "--evaluation.videos_per_task=0",
            *settings,
        )  # fmt: skip
        result = train(given, place, resume=(place / "config.yaml").exists(), command="benchmarks.progress")
        found["before PPO"] = summary(result["bc"])
        found[f"PPO by {reward}"] = summary(result["rl"])
        found["curves"][reward] = [record["success"] for record in read_metrics(place)]
        say(f"seed {seed}, PPO by {reward}: {result['bc']['success']:.3f} -> {result['rl']['success']:.3f}")
    done.write_text(json.dumps(found))
    return found


def summary(result: dict[str, Any]) -> dict[str, Any]:
    return {name: result[name] for name in ("success", "episodes", "per_task") if name in result}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
