"""Every LIBERO task beside LIBERO's own environment, and the scripted expert's success.

    python -m benchmarks.libero                          130 tasks and LIBERO-PRO's 160, two hours on one core
    python -m benchmarks.libero --suites libero_goal     one suite
    python -m benchmarks.libero --experts 10             also ten episodes of the expert per task, from fixed starts

writes benchmarks/results/libero.json. Each task is reset to its first fixed start and takes LIBERO's settling steps and
four more (tests/sims/libero_and_original.py); images are compared as means of absolute differences, of 255.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from sims.adapters.libero import PRO_SUFFIX, PUBLISHED, Suite
from sims.errors import UserError
from sims.install import interpreter
from sims.numbers.statistics import wilson_interval
from vla_rl.bench.record import Row, row, write_record

STANDARD = {suite: 90 if suite == "libero_90" else 10 for suite in get_args(Suite)}
SUITES = (*STANDARD, *(suite + suffix for suite in PUBLISHED for suffix in PRO_SUFFIX.values()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suites", nargs="+", default=SUITES, choices=SUITES)
    parser.add_argument("--experts", type=int, default=0, metavar="EPISODES", help="of each task")
    asked = parser.parse_args()
    rows: list[Row] = []
    for suite in asked.suites:
        tasks = [f"{suite}:{task}" for task in range(STANDARD.get(suite, 10))]
        rows += summary(suite, in_its_interpreter(tasks))
        if asked.experts:
            done = in_its_interpreter(["--experts", str(asked.experts), *tasks])
            rows += [expert_row(result, asked.experts) for result in done if result["success"] is not None]
    command = shlex.join(["python", "-m", "benchmarks.libero", *sys.argv[1:]])
    print(write_record("libero", rows, command=command))


def in_its_interpreter(arguments: Sequence[str]) -> list[dict[str, Any]]:
    """What tests/sims/libero_and_original.py prints. Raises UserError where LIBERO is not installed or fails."""
    python = interpreter("libero")
    if python is None:
        raise UserError("LIBERO is not installed. Run: vla-rl sims install libero")
    root = Path(__file__).parents[1]
    variables = os.environ | {"PYTHONPATH": str(root), "MUJOCO_GL": "egl", "OMP_NUM_THREADS": "1"}
    command = [python, "-m", "tests.sims.libero_and_original", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=root, env=variables, check=False)
    if done.returncode != 0:
        raise UserError(f"LIBERO's interpreter failed:\n{done.stderr[-3000:]}")
    print(done.stdout, end="", flush=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def summary(suite: str, results: Sequence[dict[str, Any]]) -> list[Row]:
    units = {"image_difference": "of 255", "state_difference": "m", "fixture_spread_m": "m"}
    largest = [row(f"{suite}: largest {key}", max(r[key] for r in results), unit) for key, unit in units.items()]
    return [row(f"{suite}: tasks", len(results), ""), *largest]


def expert_row(result: dict[str, Any], episodes: int) -> Row:
    won = result["success"]
    name = f"{result['suite']} {result['task']}: expert success, {result['instruction']}"
    return row(name, won / episodes, "", interval=list(wilson_interval(won, episodes)), seeds=[0])


if __name__ == "__main__":
    main()
