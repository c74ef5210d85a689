"""``vla-rl bench train``: where an iteration of PPO spends its time, and what crosses between device and host in it."""

from __future__ import annotations

import torch

from policies.device import select_device
from policies.policy import RobotSpec
from policies.registry import DEFAULT_POLICY, build_policy
from sims.tabletop import TabletopConfig, TabletopEnv
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.bench.options import BenchOptions
from vla_rl.bench.record import Row, row
from vla_rl.bench.transfers import TransferCounter

ITERATIONS = 2  # that are measured, after one to warm up


def bench_train(options: BenchOptions) -> list[Row]:
    """Seconds per part and transfers per name and iteration: the default policy, untrained, 8 environments, 4 chunks.

    A transfer outside of the named places (sims/devices/crossing.py) has a row "unnamed: OPERATION". UserError for a
    device that this machine does not have. On a CPU nothing crosses.
    """
    device = select_device(options.device)
    env = TabletopEnv(TabletopConfig(tasks=("pick",), num_envs=8))
    try:
        torch.manual_seed(0)
        policy = device.place(build_policy(DEFAULT_POLICY(), RobotSpec.of(env.spec)))
        ppo = PPO(PPOConfig(chunks=4, critic_warmup=0), policy, env, seed=0)
        ppo.iterate()
        seconds: dict[str, float] = {}
        with TransferCounter() as counter:
            for _ in range(ITERATIONS):
                for name, value in ppo.iterate().items():
                    if name.startswith("time/"):
                        seconds[name] = seconds.get(name, 0.0) + value
    finally:
        env.close()
    times = [
        row(name.removeprefix("time/").removesuffix("_s"), value / ITERATIONS, "s") for name, value in seconds.items()
    ]
    unnamed = sum(counter.unnamed.values()) / ITERATIONS
    crossed = [row(f"transfers, {name}", count / ITERATIONS, "1") for name, count in sorted(counter.counts.items())]
    return [*times, row("transfers, unnamed", unnamed, "1"), *crossed]
