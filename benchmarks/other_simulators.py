"""Reinforcement learning in simulators that are not ours: success before and after, from few scripted demonstrations.

    for name in metaworld robosuite maniskill libero; do vla-rl sims install $name; done
    python -m benchmarks.other_simulators drawer-open door-open lift --seeds 0 1 2

A case is a configuration in configs/ and what is changed in it. Runs ``vla-rl train`` once per case and seed (a run
that was interrupted is resumed, a finished one is only read) and writes benchmarks/results/other_simulators.json:
success on held-out starts of imitation, after PPO, of the exploring policy after it, and of the deployed one with blank
images, means over seeds with intervals over seeds and episodes (sims/numbers/statistics.py); control steps and hours of
reinforcement learning; of each run the curve and the command. Cases that were measured before and are not named are
kept. ``--longer`` adds the control: each run's demonstrations cloned for four times the updates, without reinforcement,
evaluated on the same starts.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.learning import mean_row, one_run, vla_rl
from vla_rl.bench.record import Row, read_record, row, write_record
from vla_rl.config.experiment import Imitation
from vla_rl.runs.metrics import read_metrics
from vla_rl.runs.run_dir import experiment_of

ROOT = Path(__file__).parents[1]
NAME = "other_simulators"
STAGES = {"bc": "imitation", "rl": "after PPO", "stochastic": "after PPO, exploring"}
BLIND = "after PPO, blank images"
CONTROL_EPISODES = 60
LONGER = 4  # times the updates
CLONED_LONGER = "cloned four times as long"


@dataclass(frozen=True, kw_only=True)
class Case:
    """``config``: a file in configs/, without .yaml. ``settings``: arguments of ``vla-rl train``."""

    config: str
    settings: tuple[str, ...] = ()


CASES: Mapping[str, Case] = {
    "drawer-open": Case(config="metaworld"),
    "door-open": Case(config="metaworld", settings=("--sim.tasks", "[door-open]")),
    "lever-pull": Case(
        config="metaworld",
        settings=("--sim.tasks", "[lever-pull]", "--start.episodes", "200", "--start.bc.steps", "1500"),
    ),
    "lift": Case(config="robosuite"),
    "door": Case(config="robosuite", settings=("--sim.task", "Door", "--start.episodes", "5")),
    "push-cube": Case(config="maniskill"),
    "libero-goal": Case(config="libero"),
    "button-press-topdown": Case(config="metaworld", settings=("--sim.tasks", "[button-press-topdown]")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", choices=CASES, metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--longer", action="store_true", help=CLONED_LONGER)
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / NAME)
    arguments = parser.parse_args()
    found = read_record(NAME).get("runs", {})
    command = f"python -m benchmarks.{NAME} " + " ".join(sys.argv[1:])
    for i, name in enumerate(arguments.cases, start=1):
        found[name] = [run(name, seed, arguments.runs) for seed in arguments.seeds]
        if arguments.longer:
            found[name] = [one | {"longer": cloned_longer(name, one["seed"], arguments.runs)} for one in found[name]]
        rows = {name: rows_of(name, runs) for name, runs in found.items()}
        kept = [one["name"] for name in rows.keys() - set(arguments.cases[:i]) for one in rows[name]]
        together = [one for made in rows.values() for one in made]
        print(write_record(NAME, together, command=command, kept=kept, runs=found))


def run(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """One run of a case; adds the control steps and the seconds that reinforcement learning took, also if resumed."""
    case = CASES[name]
    controls = ["--evaluation.control_episodes", str(CONTROL_EPISODES)]
    result = one_run(case.config, seed, [*case.settings, *controls], folder / name)
    records = read_metrics(folder / name / f"{case.config}-{seed}")
    return result | {"control_steps": sum(one["control_steps"] for one in records), "rl_s": records[-1]["wall_s"]}


def cloned_longer(name: str, seed: int, folder: Path) -> dict[str, Any]:
    """Success of a policy cloned for ``LONGER`` times the updates from the demonstrations of a finished run."""
    run_dir = folder / name / f"{CASES[name].config}-{seed}"
    experiment = experiment_of(run_dir)
    assert isinstance(experiment.start, Imitation)
    out, updates = run_dir / "cloned_longer", LONGER * experiment.start.bc.steps
    demonstrations = ("--store", run_dir / "demonstrations")
    vla_rl("imitate", run_dir / "config.yaml", *demonstrations, "--out", out, "--start.bc.steps", updates)
    found = json.loads(vla_rl("eval", out / "bundle", "--episodes", experiment.evaluation.episodes, "--json"))
    return {"updates": updates} | found


def rows_of(name: str, runs: Sequence[Mapping[str, Any]]) -> list[Row]:
    rows = [mean_row(f"{name}, {text}", runs, stage) for stage, text in STAGES.items()]
    rows[1] |= {"ratio": rows[1]["value"] / rows[0]["value"] if rows[0]["value"] else None, "against": rows[0]["name"]}
    if blind := [one for one in runs if one["controls"].get("blank_images")]:  # not measured in every run
        rows.append(mean_row(f"{name}, {BLIND}", blind, "controls", "blank_images"))
    if all("longer" in one for one in runs):
        rows.append(mean_row(f"{name}, {CLONED_LONGER}", runs, "longer"))
    seeds = [one["seed"] for one in runs]
    hours = mean(one["rl_s"] for one in runs) / 3600
    rows.append(row(f"{name}, control steps", mean(one["control_steps"] for one in runs), "steps", seeds=seeds))
    rows.append(row(f"{name}, PPO and its validation", hours, "h", seeds=seeds))
    return rows


if __name__ == "__main__":
    main()
