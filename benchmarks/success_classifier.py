"""How good is a success classifier on the tabletop suite, and what does PPO do that gets nothing else as its reward?

    python -m benchmarks.success_classifier [--episodes 100 500] [--ppo-iterations 20] [--work DIR]

Episodes are those of the quick start's demonstrator with its errors, half reach and half open_drawer, failed ones too.
For each number of episodes a classifier is fitted to three fifths of them, its threshold is chosen on a fifth at
precision 0.95, and the rates are measured on the last fifth; then in 200 held-out episodes of a half-trained policy
that explores, which the classifier has never seen. The classifier fitted to most episodes then is the reward of PPO
from that policy, beside PPO by the true outcome with the same settings. Writes
benchmarks/results/success_classifier.json. One seed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from policies.device import CPU
from vla_rl.api import load_experiment
from vla_rl.bench.record import Row, row, write_record
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.config.packaged import PACKAGED
from vla_rl.rewards.classifier import SuccessClassifierConfig
from vla_rl.runners.demonstrations import collect
from vla_rl.runners.imitation import imitate
from vla_rl.runners.reward import compare_with_truth, fit_classifier
from vla_rl.runners.train import train
from vla_rl.runs.metrics import read_metrics

TASKS = "--sim.tasks=[reach, open_drawer]"
POLICY_EPISODES = 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, nargs="+", default=[100, 500])
    parser.add_argument("--ppo-iterations", type=int, default=20)
    parser.add_argument("--work", type=Path, default=Path("runs/success_classifier_benchmark"))
    arguments = parser.parse_args()
    work: Path = arguments.work
    policy = half_trained_policy(work)
    rows: list[Row] = []
    for count in arguments.episodes:
        rows += classifier_rows(work, policy, count, "pictures", "--state=false")
    most = max(arguments.episodes)
    rows += classifier_rows(work, policy, most, "pictures and state", "--state=true")
    rows += ppo_rows(work, policy, work / f"pictures_{most}", arguments.ppo_iterations)
    counts = " ".join(map(str, arguments.episodes))
    command = f"python -m benchmarks.success_classifier --episodes {counts} --ppo-iterations {arguments.ppo_iterations}"
    print(write_record("success_classifier", rows, command=command, tasks=["reach", "open_drawer"], seed=0))


def experiment(*settings: str) -> Experiment:
    return load_experiment("quickstart", TASKS, "--sim.num_envs=32", *settings)


def half_trained_policy(work: Path) -> Path:
    """Cloned from 25 demonstrations of each task in an eighth of the quick start's updates."""
    given = experiment("--seed=7", "--start.bc.steps=100")
    store = work / "demonstrations"
    if not store.exists():
        collect(given, episodes=50, out=store)
    return imitate(given, work / "policy", store=store)


def classifier_rows(work: Path, policy: Path, count: int, name: str, setting: str) -> list[Row]:
    store, folder = work / f"episodes_{count}", work / f"{name.replace(' ', '_')}_{count}"
    if not store.exists():
        collect(experiment("--seed=1"), episodes=count, out=store, failures=True)
    config = load_config(SuccessClassifierConfig, PACKAGED / "rewards" / "tabletop.yaml", [setting])
    report = fit_classifier(config, [store], folder, seed=0, device=CPU)
    label = f"{count} episodes, {name}"
    rows = rate_rows(report["episodes"], f"{label}, demonstrator")
    rows += rate_rows({f"observation {key}": report["frames"][key] for key in ("precision", "recall")}, label)
    rows.append(row(f"calibration error, {label}", report["calibration_error"], "1"))
    rows.append(row(f"AUC, {label}", report["auc"], "1"))
    compared = compare_with_truth(folder, experiment(), policy, episodes=POLICY_EPISODES, seed=0, explore=True)
    for task, rates in compared["per_task"].items():
        rows += rate_rows(rates, f"{label}, policy, {task}")
    return [*rows, *rate_rows(compared, f"{label}, policy")]


def rate_rows(rates: dict[str, Any], label: str) -> list[Row]:
    named = {name: rate for name, rate in rates.items() if isinstance(rate, dict) and "value" in rate}
    rows = []
    for name, rate in named.items():
        rows.append(row(f"{name.replace('_', ' ')}, {label}", rate["value"], "1"))
        rows[-1] |= {"interval": rate["interval"], "count": rate["count"], "total": rate["total"]}
    return rows


def ppo_rows(work: Path, policy: Path, classifier: Path, iterations: int) -> list[Row]:
    """True success before and after, and how often the reward was wrong in the first and the last quarter."""
    rows: list[Row] = []
    for name, reward in {
        "outcome": ["--reward.name=outcome"],
        "classifier": ["--reward.name=classifier", f"--reward.path={classifier}"],
    }.items():
        given = experiment(
            "--start.name=bundle", f"--start.path={policy}", f"--algorithm.iterations={iterations}",
            "--evaluation.episodes=200", "--evaluation.videos_per_task=0", "--evaluation.validate_every=0", *reward,
        )  # fmt: skip
        folder = work / f"ppo_{name}"
        result = train(given, folder, resume=(folder / "config.yaml").exists(), command="benchmarks.success_classifier")
        for stage, key in (("before", "bc"), ("after", "rl")):
            rows.append(row(f"success {stage} PPO by {name}", result[key]["success"], "1"))
            rows[-1] |= {"interval": result[key]["interval"], "episodes": result[key]["episodes"]}
        wrong = [record.get("reward_false_positives") for record in read_metrics(folder)]
        quarter = max(1, len(wrong) // 4)
        for when, part in (("first", wrong[:quarter]), ("last", wrong[-quarter:])):
            if known := [value for value in part if value is not None]:
                mean = sum(known) / len(known)
                rows.append(row(f"reward false positives, {when} quarter of PPO by {name}", mean, "1"))
    return rows


if __name__ == "__main__":
    main()
