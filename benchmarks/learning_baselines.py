"""What the time of reinforcement learning gains when it is spent otherwise, from the same demonstrations.

    python -m benchmarks.learning_baselines runs/learning/quickstart-{0,1,2} --minutes 15

For each finished run of ``vla-rl train`` (benchmarks/learning.py leaves them):

* more_imitation: the same demonstrations are cloned, from the start, for as many updates as fit in the time.
* self_imitation: rounds of ``--episodes`` exploring episodes on training starts, of which the successes are kept,
  and behavior cloning of the demonstrations and the newest successes in equal shares (filtered behavior cloning).

All are evaluated on the held-out starts of their run, beside what the run itself reached. Writes
benchmarks/results/baselines.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.kept import keep_options
from benchmarks.learning import mean_row
from episodes.files import write_json
from episodes.recorder import RecordedEnv, keep_successes
from episodes.store import EpisodeStore
from policies.bundle import load_bundle
from policies.device import make_generator
from policies.policy import RobotSpec
from sims.devices.env_on_device import on_device
from sims.numbers.seeding import spawn_seed
from sims.registry import evaluation_starts
from sims.starts import StartSequence
from sims.vector_env import VectorEnv
from vla_rl.bench.record import write_record
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.runners.evaluate import PolicyActor, evaluate_policy, run_episodes
from vla_rl.runners.imitation import CloningSource, clone, new_policy
from vla_rl.runs.run_dir import experiment_device, experiment_of

KEPT_ROUNDS = 4  # of successes, so that a round's cloning costs the same at the end as at the beginning


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--minutes", type=float, required=True, help="of processor time that each baseline gets")
    parser.add_argument("--episodes", type=int, default=800, help="of a round of self-imitation")
    parser.add_argument("--steps", type=int, default=300, help="updates of behavior cloning of such a round")
    parser.add_argument("--only", choices=sorted(BASELINES), nargs="+", default=sorted(BASELINES))
    arguments = parser.parse_args()
    results = [one_run(run, arguments) for run in arguments.runs]
    command = "python -m benchmarks.learning_baselines " + " ".join(sys.argv[1:])
    rows = [mean_row(name, results, name) for name in ("imitation", *arguments.only, "reinforcement")]
    print(write_record("baselines", rows, command=command, runs=results))


def one_run(run_dir: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Successes of the baselines and of the run, on equal starts. What a call before this one finished is kept.

    UserError where that had other options.
    """
    experiment, reached = experiment_of(run_dir), json.loads((run_dir / "result.json").read_text())
    result = {"seed": experiment.seed, "imitation": reached["bc"], "reinforcement": reached["rl"]}
    env = make_env(experiment.sim)
    try:
        for name in arguments.only:
            folder = run_dir / "baselines" / name
            done = folder / "result.json"
            if not done.exists():
                shutil.rmtree(folder, ignore_errors=True)
            keep_options(folder, options_of(name, arguments))
            if not done.exists():
                began = time.monotonic()
                bundle, spent = BASELINES[name](experiment, env, run_dir, folder, arguments)
                seconds = round(time.monotonic() - began, 1)
                summary = evaluate(experiment, env, bundle, episodes=reached["rl"]["episodes"])
                write_json(done, summary | {"spent": spent, "wall_s": seconds, "minutes": arguments.minutes})
            result[name] = json.loads(done.read_text())
            print(f"seed {experiment.seed} {name}: {result[name]['success']:.3f} {result[name]['spent']}", flush=True)
    finally:
        env.close()
    return result


def options_of(name: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """On which the results of baseline ``name`` depend."""
    rounds = {"episodes": arguments.episodes, "steps": arguments.steps} if name == "self_imitation" else {}
    return {"minutes": arguments.minutes} | rounds


def evaluate(experiment: Experiment, env: VectorEnv, bundle: Path, *, episodes: int) -> dict[str, Any]:
    policy = load_bundle(bundle, robot=RobotSpec.of(env.spec), device=experiment_device(experiment))
    seed = experiment.evaluation_seed
    starts = evaluation_starts(experiment.sim, num_tasks=len(env.spec.tasks), seed=seed, episodes=episodes)
    return evaluate_policy(policy, env, starts, seed=seed, stochastic=False)


def more_imitation(
    experiment: Experiment, env: VectorEnv, run_dir: Path, folder: Path, arguments: argparse.Namespace
) -> tuple[Path, dict[str, Any]]:
    """As the run cloned, with more updates."""
    start = experiment.start
    assert isinstance(start, Imitation)
    robot, stores = RobotSpec.of(env.spec), [CloningSource(store=run_dir / "demonstrations")]

    def fit(steps: int, folder: Path) -> Path:
        policy = new_policy(start, robot, seed=experiment.seed, device=experiment_device(experiment))
        config = replace(start.bc, steps=steps)
        return clone(policy, stores, config, folder, seed=experiment.seed, fit_normalizer=True)

    trial = 200
    fit(10, folder / "warm_up")
    began = time.process_time()
    fit(trial, folder / "trial")
    steps = int(60 * arguments.minutes / (time.process_time() - began) * trial)
    return fit(steps, folder / "all"), {"updates": steps}


def self_imitation(
    experiment: Experiment, env: VectorEnv, run_dir: Path, folder: Path, arguments: argparse.Namespace
) -> tuple[Path, dict[str, Any]]:
    """From the cloned policy of the run; every round clones from where the last one ended."""
    start, seed = experiment.start, experiment.seed
    assert isinstance(start, Imitation)
    config = replace(start.bc, steps=arguments.steps, learning_rate=0.3 * start.bc.learning_rate)
    bundle, stores = run_dir / "imitation" / "bundle", [CloningSource(store=run_dir / "demonstrations")]
    starts = StartSequence("train", seed=seed, num_tasks=len(env.spec.tasks))
    ends, control_steps, exploring, number = time.process_time() + 60 * arguments.minutes, 0, [], 0
    while time.process_time() < ends:
        policy = load_bundle(bundle, device=experiment_device(experiment))
        store = EpisodeStore(folder / f"episodes_{number}", create=True)
        recorder = RecordedEnv(env, store, source="policy", split="train", keep=keep_successes)
        generator = make_generator(policy.device, spawn_seed(seed, "self-imitation", number))
        actor = PolicyActor(policy, env.spec.num_envs, generator, stochastic=True)
        results = run_episodes(on_device(recorder, policy.device), actor, starts.take(arguments.episodes))
        recorder.commit()
        store.close()
        stores = [stores[0], *stores[1:][-(KEPT_ROUNDS - 1) :], CloningSource(store=store.path)]
        control_steps += int(results.steps.sum())
        exploring.append(round(results.success.float().mean().item(), 3))
        bundle = clone(policy, stores, config, folder / f"round_{number}", seed=seed + number, fit_normalizer=False)
        number += 1
    return bundle, {"rounds": number, "control_steps": control_steps, "exploring": exploring}


BASELINES: Mapping[str, Callable[..., tuple[Path, dict[str, Any]]]] = {
    "more_imitation": more_imitation,
    "self_imitation": self_imitation,
}


if __name__ == "__main__":
    main()
