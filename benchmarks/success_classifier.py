"""How good is a success classifier on the tabletop suite, and what does PPO do that gets nothing else as its reward?

    python -m benchmarks.success_classifier [--episodes 100 500] [--ppo-iterations 20] [--work DIR]

Episodes are those of the quick start's demonstrator with its errors, half reach and half open_drawer, failed ones too.
For each number of episodes a classifier is fitted to three fifths of them, its threshold is chosen on a fifth at
precision 0.95, and the rates are measured on the last fifth; then in 200 held-out episodes of a half-trained policy
that explores, which the classifier has never seen. One more is also fitted to as many episodes of that policy, from
other starts. Classifiers then are the only reward of PPO from that policy, beside PPO by the true outcome with the
same settings. Writes benchmarks/results/success_classifier.json. One seed.
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
    most = max(arguments.episodes)
    demonstrated = {count: demonstrations(work, count) for count in arguments.episodes}
    kinds = {
        **{f"{count} episodes": ([store], "--state=false") for count, store in demonstrated.items()},
        f"{most} episodes with the state": ([demonstrated[most]], "--state=true"),
        f"{most} episodes and {most} of the policy": (
            [demonstrated[most], policy_episodes(work, policy, most)],
            "--state=false",
        ),
    }
    for name, (stores, setting) in kinds.items():
        rows += classifier_rows(folder_of(work, name), policy, name, stores, setting)
    rewards = {"outcome": ["--reward.name=outcome"]}
    for name in (f"{most} episodes", f"{most} episodes and {most} of the policy"):
        rewards[f"classifier of {name}"] = ["--reward.name=classifier", f"--reward.path={folder_of(work, name)}"]
    for name, reward in rewards.items():
        rows += ppo_rows(folder_of(work, f"ppo {name}"), policy, name, reward, arguments.ppo_iterations)
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


def demonstrations(work: Path, count: int) -> Path:
    store = work / f"episodes_{count}"
    if not store.exists():
        collect(experiment("--seed=1"), episodes=count, out=store, failures=True)
    return store


def policy_episodes(work: Path, policy: Path, count: int) -> Path:
    store = work / f"policy_episodes_{count}"
    if not store.exists():
        collect(experiment("--seed=2"), episodes=count, out=store, policy=policy)
    return store


def folder_of(work: Path, name: str) -> Path:
    return work / name.replace(" ", "_")


def classifier_rows(folder: Path, policy: Path, name: str, stores: list[Path], setting: str) -> list[Row]:
    config = load_config(SuccessClassifierConfig, PACKAGED / "rewards" / "tabletop.yaml", [setting])
    report = fit_classifier(config, stores, folder, seed=0, device=CPU)
    rows = rate_rows(report["episodes"], f"{name}, held out")
    rows += rate_rows(report["without_ends"], f"{name}, without ends")
    rows += rate_rows({f"observation {key}": report["observations"][key] for key in ("precision", "recall")}, name)
    rows.append(row(f"calibration error, {name}", report["calibration_error"], "1"))
    rows.append(row(f"AUC, {name}", report["auc"], "1"))
    compared = compare_with_truth(folder, experiment(), policy, episodes=POLICY_EPISODES, seed=0, explore=True)
    for task, rates in compared["per_task"].items():
        rows += rate_rows(rates, f"{name}, policy, {task}")
    return [*rows, *rate_rows(compared, f"{name}, policy")]


def rate_rows(rates: dict[str, Any], label: str) -> list[Row]:
    named = {name: rate for name, rate in rates.items() if isinstance(rate, dict) and "value" in rate}
    rows = []
    for name, rate in named.items():
        rows.append(row(f"{name.replace('_', ' ')}, {label}", rate["value"], "1"))
        rows[-1] |= {"interval": rate["interval"], "count": rate["count"], "total": rate["total"]}
    return rows


def ppo_rows(folder: Path, policy: Path, name: str, reward: list[str], iterations: int) -> list[Row]:
    """True success before and after, and how often the reward was wrong in the first and the last quarter."""
    rows: list[Row] = []
    given = experiment(
        "--start.name=bundle", f"--start.path={policy}", f"--algorithm.iterations={iterations}",
        "--evaluation.episodes=200", "--evaluation.videos_per_task=0", "--evaluation.validate_every=0", *reward,
    )  # fmt: skip
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
