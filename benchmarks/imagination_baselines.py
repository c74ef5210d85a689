"""What imagined training gains, and what as many real control steps gain without a world model from the same start.

    python -m benchmarks.imagination_baselines --config configs/imagined_drawer.yaml --seeds 0 1 2

The whole configuration records real episodes in rounds, clones their successes after each, trains in a world model
that is fitted to all of them, and validates policies, three for the drawer. Beside it the last of its clones, and all
its real episodes, those of validation too, spent otherwise, from the same clone of the demonstrations:

* ``self-imitation, rounds: N`` (``--rounds``): the episodes are recorded in N equal parts, each with the policy that
  cloned the successes of those before it, without perturbed actions.
* ``self-imitation, then PPO``: one half is recorded and its successes cloned, PPO in the simulator takes as many
  control steps as the other half has; ``--simulator`` changes settings of that PPO alone.

200 held-out starts a seed; intervals over seeds and episodes (sims/numbers/statistics.py). Writes
benchmarks/results/imagination_baselines_NAME.json. The same command resumes an interrupted benchmark.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.learning import mean_row
from benchmarks.world_model import control_steps, evaluated, experiments, finished, in_simulator, last_weights
from episodes.files import write_json
from policies.bundle import load_bundle, read_bundle_info
from sims.errors import UserError
from sims.vector_env import VectorEnv
from vla_rl.bench.record import write_record
from vla_rl.config.experiment import Experiment
from vla_rl.runners.imagination import record_round
from vla_rl.runners.imitation import CloningSource, clone
from vla_rl.runners.logs import FIGURES
from vla_rl.runners.train import logged_failures, opened, starting_bundle
from vla_rl.runs.run_dir import CONFIG_FILE, Run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=Path, default=Path("configs/imagined_drawer.yaml"))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--rounds", type=int, nargs="+", default=[1, 4, 8], help="of self-imitation")
    parser.add_argument("--simulator", nargs="+", default=[], metavar="NAME=VALUE", help="settings of PPO")
    parser.add_argument("--work", type=Path, help="default: runs/imagination_baselines/NAME")
    arguments = parser.parse_args()
    name = arguments.config.stem.removeprefix("imagined_")
    work: Path = arguments.work or Path("runs/imagination_baselines") / name
    runs: list[dict[str, Any]] = []
    for seed in arguments.seeds:
        experiment, simulated = experiments(arguments.config, ["--seed", str(seed)], arguments.simulator)
        runs.append({"seed": seed, **one_seed(experiment, simulated, work / f"seed_{seed}", arguments.rounds)})
        rows = [mean_row(one, runs, one) for one in runs[0] if one != "seed"]
        command = "python -m benchmarks.imagination_baselines " + " ".join(sys.argv[1:])
        print(write_record(f"imagination_baselines_{name}", rows, command=command, runs=runs))


def one_seed(experiment: Experiment, simulated: Experiment, work: Path, rounds: Sequence[int]) -> dict[str, Any]:
    """Summaries of the held-out starts by name, each with its real control steps. Finished ones are kept."""
    episodes = real_episodes(experiment)
    return with_world_model(experiment, work) | without_world_model(experiment, simulated, work, rounds, episodes)


def real_episodes(experiment: Experiment) -> int:
    """What the whole configuration records, and validates with: the start, and for each world model the clone of the
    successes before it and what was trained in it. UserError where it clones no successes."""
    settings = experiment.imagination
    if settings is None or settings.clone_successes is None:
        raise UserError("the configuration has no imagination.clone_successes: its last clone is one of the rows")
    validations = 1 + 2 * (settings.rounds // settings.imagine_every)
    return settings.rounds * settings.real_episodes + validations * experiment.evaluation.validation_episodes


def with_world_model(experiment: Experiment, work: Path) -> dict[str, Any]:
    assert experiment.imagination is not None
    last = experiment.imagination.rounds - 1
    whole = finished(experiment, work / "whole")
    clone, counted = whole["dir"] / "imagination" / f"round_{last}" / "clone" / "bundle", whole["stages"]["reinforce"]
    report = whole["stages"][f"evaluate_model_{last}"]
    return {
        "imitation": whole["result"]["bc"],
        "the last clone": kept(work / "last_clone", lambda _: evaluated(experiment, load_bundle(clone)))
        | {"control_steps": counted["real_steps"]},
        "the whole configuration": whole["result"]["rl"]
        | {"control_steps": counted["real_steps"] + counted["validation_steps"] + counted["evaluation_steps"]}
        | {"world_model": {name: report[name] for name in FIGURES if name in report}},
    }


def without_world_model(
    experiment: Experiment, simulated: Experiment, work: Path, rounds: Sequence[int], episodes: int
) -> dict[str, Any]:
    found, name = dict[str, Any](), "self-imitation, then PPO"
    with cloned(experiment, work / "cloned") as (run, env, start):
        for count in rounds:
            imitate = partial(self_imitation, run, env, start, [episodes // count] * count)
            found[f"self-imitation, rounds: {count}"] = kept(work / f"rounds_{count}", imitate)
        half = kept(work / "half", partial(self_imitation, run, env, start, [episodes // 2]))
    wanted = in_simulator(simulated, work / "half" / "round_0" / "bundle", half["control_steps"])
    trained = finished(wanted, work / "then_ppo")
    last = kept(work / "last", lambda _: evaluated(wanted, last_weights(trained["dir"])))
    steps = {"control_steps": half["control_steps"] + control_steps(trained["dir"])}
    return found | {
        "self-imitation of half": half,
        name: trained["result"]["rl"] | steps,
        f"{name}, last weights": last | steps,
    }


@contextmanager
def cloned(experiment: Experiment, folder: Path) -> Iterator[tuple[Run, VectorEnv, Path]]:
    """A run whose demonstrations are recorded and cloned, its environment, the bundle."""
    known = (folder / CONFIG_FILE).exists()
    command = "python -m benchmarks.imagination_baselines"
    with (
        opened(experiment, folder, resume=known, command=command) as (run, env),
        logged_failures(run, env) as failures,
    ):
        yield run, env, starting_bundle(run, env, failures)


def kept(folder: Path, measure: Callable[[Path], dict[str, Any]]) -> dict[str, Any]:
    """What ``measure`` found with this folder, or an earlier call; what that left unfinished is deleted."""
    result = folder / "result.json"
    if not result.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        write_json(result, measure(folder))
    return json.loads(result.read_text())


def self_imitation(run: Run, env: VectorEnv, start: Path, parts: Sequence[int], folder: Path) -> dict[str, Any]:
    """Rounds of ``parts`` real episodes, each followed by cloning all successes so far and the demonstrations."""
    settings = run.experiment.imagination
    assert settings is not None and settings.clone_successes is not None
    bundle, stores, steps = start, [run.demonstrations], 0
    for number, episodes in enumerate(parts):
        part = folder / f"round_{number}"
        recording = replace(settings, real_episodes=episodes, perturbed_chunks=0.0)
        steps += record_round(run, env, bundle, part / "episodes", recording, number=number)["control_steps"]
        stores.append(part / "episodes")
        sources = [CloningSource(store=store) for store in stores]  # held-out ones too: no world model is evaluated
        policy, parent = load_bundle(bundle, device=run.device), read_bundle_info(bundle).sha256
        bundle = clone(
            policy,
            sources,
            settings.clone_successes,
            part,
            seed=run.experiment.seed,
            fit_normalizer=False,
            parent=parent,
        )
    return evaluated(run.experiment, load_bundle(bundle)) | {"control_steps": steps}


if __name__ == "__main__":
    main()
