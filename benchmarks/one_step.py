"""A tuned policy distilled to one denoising step: what it loses in success, and what it saves.

    python -m benchmarks.one_step RUN [RUN ...] [--work DIR]

Each RUN is a finished run of one configuration, such as the quick start. ``vla-rl distill`` fits a student to its
policy (settings of section distillation), then teacher and student act from the same held-out starts. Runs that are
complete in --work are not repeated. Writes benchmarks/results/one_step.json: success with intervals over runs and
episodes, the difference, and milliseconds of one chunk of one observation, medians of 50.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.learning import mean_row
from vla_rl.bench.record import Row, row, write_record
from vla_rl.runners.distill import distill
from vla_rl.runs.run_dir import experiment_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN")
    parser.add_argument("--work", type=Path, default=Path("runs/one_step"))
    arguments = parser.parse_args()
    found = [distilled(run, arguments.work / run.name) for run in arguments.runs]
    command = "python -m benchmarks.one_step " + " ".join(sys.argv[1:])
    print(write_record("one_step", rows_of(found), command=command, runs=found))


def distilled(run: Path, out: Path) -> dict[str, Any]:
    """What ``vla-rl distill`` found, or an earlier call of it."""
    experiment, result = experiment_of(run), out / "result.json"
    if not result.exists():
        distill(experiment, run / "bundle", out)
    found = json.loads(result.read_text())
    return {"seed": experiment.seed, **{key: found[key] for key in ("denoising_steps", "teacher", "student")}}


def rows_of(runs: list[dict[str, Any]]) -> list[Row]:
    rows = [mean_row(f"{name} success", runs, name) for name in ("teacher", "student")]
    losses = [one["teacher"]["success"] - one["student"]["success"] for one in runs]
    rows.append(row("success lost", statistics.mean(losses), "1", seeds=[one["seed"] for one in runs], values=losses))
    for part in ("encode_ms", "act_ms"):
        teacher, student = (statistics.median(one[name][part] for one in runs) for name in ("teacher", "student"))
        rows.append(row(f"teacher {part}", teacher, "ms"))
        rows.append(row(f"student {part}", student, "ms", ratio=teacher / student, against=f"teacher {part}"))
    return rows


if __name__ == "__main__":
    main()
