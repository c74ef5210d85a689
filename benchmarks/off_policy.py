"""Residual off-policy learning from a cloned policy: success against control steps and CPU time, with its ablations.

    python -m benchmarks.off_policy resfit --seeds 0 1 2 --steps 20000
    python -m benchmarks.off_policy resfit --seeds 0 --arms full ppo --sim.tasks "[push]"
    python -m benchmarks.off_policy resfit_lift --seeds 0 1 2 3 4 --steps 20000

For each seed: demonstrations and a cloned policy as configs/off_policy/NAME.yaml says, once for all arms
(--section.key VALUE overrides any setting). Every arm then learns for --steps control steps, the warm-up included, and
is evaluated on the same held-out starts every --every steps. CPU seconds are of this process and the simulators'
workers, learning and acting, without evaluation. Writes benchmarks/results/off_policy_TASK.json: success of the cloned
policy ("base") and of each arm at the end, mean over seeds with an interval over seeds and episodes; the curves. "ppo
at the same success, step ratio": control steps until the full method first has the success that PPO ends with, of
those that PPO took; no value where a seed does not get there.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import yaml

from benchmarks.learning import mean_row
from benchmarks.peers.pace import Moment
from policies.bundle import load_bundle
from policies.policy import Policy
from policies.residual.policy import residual_on
from sims.starts import StartSequence
from sims.vector_env import VectorEnv
from vla_rl.algorithms.algorithm import Algorithm
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.bench.record import Row, row, write_record
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.config.loader import load_config
from vla_rl.config.overrides import parse_overrides
from vla_rl.runners.demonstrations import collect
from vla_rl.runners.evaluate import evaluate_policy
from vla_rl.runners.imitation import imitate

ROOT = Path(__file__).parents[1]
ARMS: Mapping[str, list[str]] = {
    "full": [],
    "no layer norm": ["--algorithm.critic.layer_norm", "false"],
    "no weight of corrections": ["--algorithm.correction_weight", "0"],
    "no demonstrations": ["--algorithm.demonstration_share", "0"],
    "no residual": ["--start.residual.around", "middle", "--start.residual.scale", "1"],
    "ppo": [],  # of the cloned policy itself, as the configuration says that NAME.yaml extends
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", help="a configuration in configs/off_policy/, without .yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=["full"])
    parser.add_argument("--steps", type=int, default=20_000, help="control steps of each arm")
    parser.add_argument("--every", type=int, default=2_500, help="control steps between evaluations")
    parser.add_argument("--episodes", type=int, default=100, help="of each evaluation")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "off_policy")
    arguments, settings = parser.parse_known_args()
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, Any]]] = {arm: [] for arm in arguments.arms}
    command = "python -m benchmarks.off_policy " + " ".join(sys.argv[1:])
    for seed in arguments.seeds:
        for arm in arguments.arms:
            experiment = experiment_of(arguments.name, arm, [*settings, "--seed", str(seed)])
            tasks = task_names(experiment)
            bundle, store = start_of(experiment, arguments.runs / f"{arguments.name}-{tasks}-{seed}")
            curve = learn(experiment, bundle, store, arguments, title=f"seed {seed}, {arm}")
            found[arm].append({"seed": seed, "curve": curve})
            write_record(
                f"off_policy_{tasks}",
                rows_of(arguments.name, found, arguments.episodes),
                command=command,
                curves=found,
            )


def experiment_of(name: str, arm: str, settings: Sequence[str]) -> Experiment:
    path = ROOT / "configs" / "off_policy" / f"{name}.yaml"
    if arm != "ppo":
        return load_config(Experiment, path, [*settings, *ARMS[arm]])
    own = load_config(Experiment, path, settings)
    assert isinstance(own.start, Imitation)
    shared = [f"--seed={own.seed}", f"--start.episodes={own.start.episodes}", f"--start.noise={own.start.noise}"]
    if hasattr(own.sim, "tasks"):
        shared.append(f"--sim.tasks={json.dumps(list(own.sim.tasks))}")
    for keys, value in parse_overrides(settings):  # of what both share: the simulator and the cloned policy
        if keys[0] in ("sim", "start") and keys[:2] != ("start", "residual"):
            shared.append(f"--{'.'.join(keys)}={json.dumps(value)}")
    extended = path.parent / yaml.safe_load(path.read_text())["extends"]
    return load_config(Experiment, extended, [*shared, *ARMS[arm]])


def task_names(experiment: Experiment) -> str:
    """For the names of records and folders."""
    return "_".join(getattr(experiment.sim, "tasks", None) or (experiment.sim.task,)).lower()


def start_of(experiment: Experiment, folder: Path) -> tuple[Path, Path]:
    """The cloned policy's bundle and the demonstrations, made where they are missing."""
    store, bundle = folder / "demonstrations", folder / "imitation" / "bundle"
    if not bundle.exists():
        assert isinstance(experiment.start, Imitation)
        collect(experiment, episodes=experiment.start.episodes, out=store)
        imitate(experiment, folder / "imitation", store=store)
    return bundle, store


def learn(
    experiment: Experiment, bundle: Path, store: Path, arguments: argparse.Namespace, *, title: str
) -> list[dict[str, float]]:
    """The curve: control steps, CPU seconds, success on held-out starts and of the episodes acted since."""
    env, policy = make_env(experiment.sim), load_bundle(bundle)
    torch.manual_seed(experiment.seed)
    if experiment.start.residual is not None:
        policy = residual_on(policy, experiment.start.residual)
    algorithm = build_algorithm(experiment.algorithm.with_demonstrations([store]), policy, env, seed=experiment.seed)
    curve = [{"control_steps": 0.0, "cpu_s": 0.0, "success": evaluate(algorithm, experiment, arguments.episodes)}]
    print(f"{title}: success {curve[0]['success']:.3f} before", file=sys.stderr, flush=True)
    steps = cpu = 0.0
    while steps < arguments.steps:
        began = Moment.now()
        metrics = algorithm.iterate()
        cpu, steps = cpu + Moment.now().cpu - began.cpu, steps + metrics["control_steps"]
        if steps >= min(curve[-1]["control_steps"] + arguments.every, arguments.steps):
            success = evaluate(algorithm, experiment, arguments.episodes)
            curve.append({"control_steps": steps, "cpu_s": round(cpu, 1), "success": success})
            shown = {
                name: round(metrics[name], 4)
                for name in ("success", "q", "q_loss", "correction", "kl")
                if name in metrics
            }
            done = f"{title}: {steps:.0f} steps, {cpu:.0f} CPU-s, success {success:.3f}"
            print(done, shown, file=sys.stderr, flush=True)
    env.close()
    return curve


def evaluate(algorithm: Algorithm, experiment: Experiment, episodes: int) -> float:
    """Of the deployed policy, always on the same held-out starts, in an environment of its own."""
    env: VectorEnv = make_env(experiment.sim)
    starts = StartSequence("evaluation", seed=experiment.seed, num_tasks=len(env.spec.tasks)).take(episodes)
    policy: Policy = algorithm.deployed()
    success = evaluate_policy(policy, env, starts, seed=experiment.seed, stochastic=False)["success"]
    env.close()
    return float(success)


def rows_of(name: str, found: Mapping[str, Sequence[Mapping[str, Any]]], episodes: int) -> list[Row]:
    """Success before, of each arm after, and how many of PPO's control steps the full method needs for its success."""
    measured = {arm: runs for arm, runs in found.items() if runs}
    first = next(iter(measured.values()))
    rows = [success_row("base", first, 0, episodes)]
    for arm, runs in measured.items():
        shown = {"full": name, "ppo": "ppo"}.get(arm, f"{name}, {arm}")
        rows.append(success_row(shown, runs, -1, episodes))
    if {"full", "ppo"} <= measured.keys():
        pairs = zip(measured["full"], measured["ppo"], strict=False)
        ratios = [step_ratio(full["curve"], ppo["curve"]) for full, ppo in pairs]
        reached = [ratio for ratio in ratios if ratio is not None]
        value = mean(reached) if len(reached) == len(ratios) else None
        rows.append(row("ppo at the same success, step ratio", value, "1", values=ratios))
    return rows


def success_row(name: str, runs: Sequence[Mapping[str, Any]], index: int, episodes: int) -> Row:
    ends = [{"seed": run["seed"], "end": run["curve"][index] | {"episodes": episodes}} for run in runs]
    return mean_row(name, ends, "end")


def step_ratio(curve: Sequence[Mapping[str, float]], ppo: Sequence[Mapping[str, float]]) -> float | None:
    """Control steps until ``curve`` first has the success that ``ppo`` ends with, of those that ``ppo`` took."""
    last = ppo[-1]
    steps = (point["control_steps"] for point in curve if point["success"] >= last["success"])
    return next((taken / last["control_steps"] for taken in steps), None)


if __name__ == "__main__":
    main()
