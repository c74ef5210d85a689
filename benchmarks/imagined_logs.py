"""Recorded episodes in, a policy out, with no simulator in between: by the commands of docs/world-models.md.

    vla-rl sims install metaworld
    OMP_NUM_THREADS=1 python -m benchmarks.imagined_logs --seeds 0 1 2

The data set: 200 episodes of a policy that was cloned from four scripted demonstrations of Meta-World's drawer, as it
explores, successes and failures, as a LeRobotDataset 3.0. From it alone, ``vla-rl train imagined_logs``: the successes
are cloned, a world model is fitted, PPO trains in it. Then the policies are evaluated in Meta-World from the same
--episodes held-out starts, which differ between seeds; so do demonstrations, data sets and training. ``longer
imitation``: the successes cloned for five times as many updates. Steps that are done in --work are not repeated. Writes
benchmarks/results/imagined_logs.json: success with intervals over seeds and episodes (sims/numbers/statistics.py).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.learning import mean_row, vla_rl
from vla_rl.bench.record import Row, write_record

SIM, CONFIG = "configs/metaworld.yaml", "configs/imagined_logs.yaml"
EPISODES = 200  # of the data set


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--episodes", type=int, default=200, help="to evaluate each policy in")
    parser.add_argument("--work", type=Path, default=Path("runs/imagined_logs"))
    arguments = parser.parse_args()
    runs = [one_seed(seed, arguments.work / f"seed_{seed}", arguments.episodes) for seed in arguments.seeds]
    command = "OMP_NUM_THREADS=1 python -m benchmarks.imagined_logs " + " ".join(sys.argv[1:])
    print(write_record("imagined_logs", rows_of(runs), command=command, runs=runs))


def one_seed(seed: int, work: Path, episodes: int) -> dict[str, Any]:
    record(seed, work)
    run, store, own = work / "run", work / "store", ("--seed", seed)
    once(run, "train", CONFIG, *own, "--start.store", store, "--run-dir", run)
    once(work / "longer", "imitate", CONFIG, *own, "--store", store, "--start.bc.steps", 3000, "--out", work / "longer")
    bundles = {"bc": run / "imitation" / "bundle", "rl": run / "bundle", "longer": work / "longer" / "bundle"}
    found = {name: evaluated(bundle, work / f"{name}.json", seed, episodes) for name, bundle in bundles.items()}
    result = json.loads((run / "result.json").read_text())
    kept = {name: result[name] for name in ("imagined", "world_model", "missed", "wall_s")}
    stochastic = {name: found[name]["stochastic"] | {"episodes": episodes} for name in ("bc", "rl")}
    return {"seed": seed, **found, "exploring": stochastic, **kept}


def record(seed: int, work: Path) -> None:
    """The data set, and what is imported from it."""
    own, recorded, weak = ("--seed", seed), work / "recorded", work / "weak"
    once(work / "demos", "collect", SIM, *own, "--episodes", 4, "--out", work / "demos")
    once(weak, "imitate", SIM, *own, "--store", work / "demos", "--out", weak)
    policy = ("--policy", weak / "bundle", "--episodes", EPISODES)
    once(recorded, "collect", SIM, *own, *policy, "--out", recorded)
    once(work / "lerobot", "data", "export", recorded, "--out", work / "lerobot")
    keys = ("--camera", "topview=observation.images.topview", "--state", "observation.state", "--task", "drawer-open")
    once(work / "store", "data", "import", work / "store", "--source", work / "lerobot", *keys)


def evaluated(bundle: Path, path: Path, seed: int, episodes: int) -> dict[str, Any]:
    """Success in Meta-World."""
    if not path.exists():
        path.write_text(vla_rl("eval", bundle, "--sim", SIM, "--seed", seed, "--episodes", episodes, "--json"))
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def once(made: Path, *words: object) -> None:
    """Run the command, unless it made this folder before. An interrupted training goes on, another command restarts."""
    done = made.with_suffix(".done")
    if not done.exists():
        interrupted = (made / "config.yaml").exists()
        if not interrupted:
            shutil.rmtree(made, ignore_errors=True)
        made.parent.mkdir(parents=True, exist_ok=True)
        vla_rl(*words, *(["--resume"] if interrupted else []))
        done.touch()


def rows_of(runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    names = {"bc": "imitation", "longer": "longer imitation", "rl": "imagination"}
    rows = [mean_row(f"success, {text}", runs, name) for name, text in names.items()]
    rows += [mean_row(f"success, {names[name]}, exploring", runs, "exploring", name) for name in ("bc", "rl")]
    return rows


if __name__ == "__main__":
    main()
