"""Policies of other families learn through the same interface: behavior cloning, then PPO and GRPO.

    python -m benchmarks.policy_families --seeds 0 1 2 3 4

A point must reach the goal that its state shows; 6 demonstrations with much action noise, 60 updates of cloning, then
25 iterations of PPO or 20 of GRPO. Writes benchmarks/results/policy_families.json: success of the deployed policy on
300 held-out starts, mean over seeds with its 95 % t interval.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch

from policies.categorical import CategoricalPolicyConfig
from policies.compact_encoder import CompactEncoderConfig
from policies.gaussian import GaussianPolicyConfig
from tests.family_learning import clone, improve, success
from tests.reach_env import ReachEnv
from vla_rl.algorithms.grpo import GRPOConfig, GRPOUpdateConfig
from vla_rl.algorithms.ppo import PPOConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.bench.record import row, write_record

POLICIES: dict[str, Any] = {
    "gaussian": GaussianPolicyConfig(action_horizon=4),
    "categorical": CategoricalPolicyConfig(
        action_horizon=4, bins=16, depth=1, encoder=CompactEncoderConfig(width=64, text_width=32)
    ),
}
UPDATE = UpdateConfig(learning_rate=3e-4, minibatch=256, micro_batch=256)
ALGORITHMS: dict[str, Any] = {
    "ppo": PPOConfig(iterations=25, chunks=8, critic_warmup=1, update=UPDATE),
    "grpo": GRPOConfig(
        iterations=20,
        groups=12,
        update=GRPOUpdateConfig(learning_rate=3e-4, minibatch=256, micro_batch=256),
    ),
}
# Student's t, two-sided, n - 1 degrees of freedom
T_95 = {2: 12.71, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}


def run(policy_name: str, seed: int) -> dict[str, float]:
    """Success after cloning and after each algorithm from it."""
    base = clone(POLICIES[policy_name], ReachEnv, episodes=6, steps=60, seed=seed)
    found = {"bc": success(base, ReachEnv)}
    for name, algorithm in ALGORITHMS.items():
        improved = improve(copy.deepcopy(base), ReachEnv(num_envs=96), algorithm, seed=seed)
        found[name] = success(improved, ReachEnv)
    return found


def t_interval(values: Sequence[float]) -> list[float] | None:
    """95 % of the mean over at most ``max(T_95)`` seeds; None of a single one."""
    if len(values) == 1:
        return None
    mean, half = statistics.mean(values), T_95[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return [mean - half, mean + half]


def check_seeds(parser: argparse.ArgumentParser, seeds: Sequence[int]) -> None:
    """Ends the program before it trains where there is no interval of so many seeds."""
    if len(seeds) > max(T_95):
        parser.error(f"--seeds: at most {max(T_95)}, got {len(seeds)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    seeds = parser.parse_args().seeds
    check_seeds(parser, seeds)
    torch.set_num_threads(1)
    rows = []
    for policy_name in POLICIES:
        found = [run(policy_name, seed) for seed in seeds]
        for stage in found[0]:
            values = [one[stage] for one in found]
            mean, interval = statistics.mean(values), t_interval(values)
            if interval is not None:
                interval = [max(0.0, interval[0]), min(1.0, interval[1])]
            rows.append(row(f"{policy_name} {stage} success", mean, "1", interval=interval, seeds=seeds, values=values))
            print(rows[-1]["name"], [round(value, 3) for value in values], file=sys.stderr, flush=True)
    command = "python -m benchmarks.policy_families " + " ".join(sys.argv[1:])
    print(write_record("policy_families", rows, command=command.strip()))


if __name__ == "__main__":
    main()
