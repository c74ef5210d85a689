"""Learning curves: one configuration, several seeds, what came out.

    python benchmarks/learning.py quickstart --seeds 0 1 2
    python benchmarks/learning.py quickstart_grpo --from runs/learning/quickstart-0/imitation/bundle

Runs ``vla-rl train configs/NAME.yaml`` once per seed (--section.key VALUE overrides any setting) and writes
benchmarks/results/learning_NAME.json: before and after on the held-out starts (deployed and stochastic, with Wilson
intervals), the curve, the wall-clock seconds, the command.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from vla_rl.bench.record import row, write_record
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
    rows = [one_run(arguments.name, seed, settings, arguments.runs) for seed in arguments.seeds]
    path = write_record(
        f"learning_{arguments.name}",
        [one for group in rows for one in group["rows"]],
        command="python benchmarks/learning.py " + " ".join(sys.argv[1:]),
        runs=rows,
    )
    print(path)


def one_run(name: str, seed: int, settings: list[str], runs: Path) -> dict[str, Any]:
    """Train (or resume) and read what it left."""
    run_dir = runs / f"{name}-{seed}"
    place = os.path.relpath(run_dir, ROOT)
    command = ["vla-rl", "train", f"configs/{name}.yaml", "--seed", str(seed), *settings, "--run-dir", place]
    resume = ["--resume"] if (run_dir / "config.yaml").exists() else []
    subprocess.run([sys.executable, "-m", "vla_rl.cli", *command[1:], *resume], cwd=ROOT, check=True)
    result = json.loads((run_dir / "result.json").read_text())
    rows = [figure(f"{kind} success", result[kind], seed) for kind in ("bc", "rl", "stochastic")]
    return {
        "seed": seed,
        "command": " ".join(command),
        "rows": rows,
        "per_task": {kind: result[kind]["per_task"] for kind in ("bc", "rl")},
        "wall_s": result["wall_s"],
        "curve": [{k: r[k] for k in ("iteration", *CURVE) if k in r} for r in read_metrics(run_dir)],
    }


def figure(name: str, summary: dict[str, Any], seed: int) -> dict[str, Any]:
    return row(name, summary["success"], "1", interval=summary["interval"], seeds=[seed])


if __name__ == "__main__":
    main()
