"""``vla-rl bench train``: where an iteration of PPO spends its time, how much of it its parts alone would need, and
what crosses between device and host in it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from policies.bundle import load_bundle
from policies.policy import Policy, RobotSpec
from policies.residual.policy import residual_on
from sims.errors import UserError
from sims.tabletop import TabletopConfig
from sims.vector_env import VectorEnv
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.bench.attainable import seconds_alone
from vla_rl.bench.record import Row, row
from vla_rl.bench.transfers import TransferCounter
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.config.loader import load_config
from vla_rl.config.packaged import find_config
from vla_rl.rewards.registry import with_reward
from vla_rl.runners.imitation import new_policy
from vla_rl.runs.run_dir import experiment_device

ITERATIONS = 2  # that are measured, after one to warm up
EXAMPLE = Experiment(sim=TabletopConfig(tasks=("pick",), num_envs=8), algorithm=PPOConfig(chunks=4, critic_warmup=0))


def bench_train(config: Path | None = None, *, device: str = "auto") -> list[Row]:
    """Seconds per stage of an iteration beside what its work takes alone, and transfers per name and iteration.

    Of the experiment ``config``, its policy untrained; default: the default policy, 8 environments, 4 chunks.
    A transfer outside of the named places (sims/devices/crossing.py) has a row "unnamed: OPERATION". UserError for a
    device that this machine does not have, and for other algorithms than PPO. On a CPU nothing crosses.
    """
    experiment = EXAMPLE
    if config is not None:
        experiment = load_config(Experiment, find_config(config))
    experiment = replace(experiment, device=device)
    env = make_env(experiment.sim)
    try:
        ppo = _make_ppo(experiment, env)
        ppo.iterate()
        measured = measure(ppo)
        alone = seconds_alone(ppo, calls=measured.calls, steps=measured.steps, iterations=ITERATIONS)
        with TransferCounter() as counter:
            ppo.iterate()
    finally:
        env.close()
    crossed = [row(f"transfers, {name}", float(count), "1") for name, count in sorted(counter.counts.items())]
    unnamed = row("transfers, unnamed", float(sum(counter.unnamed.values())), "1")
    return [*time_rows(measured, alone), unnamed, *crossed]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Means of an iteration: all seconds, those of each stage, how often each stage began, steps of the optimizer."""

    total: float
    seconds: Mapping[str, float]
    calls: Mapping[str, float]
    steps: float


def measure(ppo: PPO) -> Measured:
    """Of ITERATIONS iterations."""
    timer, steps = ppo.collector.timer, Counter[str]()
    seconds: dict[str, float] = {}
    assert isinstance(ppo.update, ClippedUpdate)  # in this process
    counting = ppo.update.optimizer.register_step_post_hook(lambda *_: steps.update(["optimizer"]))
    timer.record(True)
    began = time.perf_counter()
    for _ in range(ITERATIONS):
        for name, value in ppo.iterate().items():
            if name.startswith("time/"):
                stage = name.removeprefix("time/").removesuffix("_s")
                seconds[stage] = seconds.get(stage, 0.0) + value
    total = time.perf_counter() - began
    timer.record(False)
    counting.remove()
    calls = Counter(span.name for span in timer.take_spans().get("", ()))
    return Measured(
        total=total / ITERATIONS,
        seconds={name: value / ITERATIONS for name, value in seconds.items()},
        calls={name: count / ITERATIONS for name, count in calls.items()},
        steps=steps["optimizer"] / ITERATIONS,
    )


def time_rows(measured: Measured, alone: Mapping[str, float]) -> list[Row]:
    """Each stage with the share of its time that its work takes alone, and the same of the whole iteration."""
    achieved = {**measured.seconds, "other": measured.total - sum(measured.seconds.values())}
    shares = {name: alone[name] / value for name, value in achieved.items() if name in alone}
    rows = [
        row(name, value, "s", ratio=shares.get(name), against="alone / here" if name in shares else None)
        for name, value in achieved.items()
    ]
    lost = {name: value - alone.get(name, 0.0) for name, value in achieved.items()}
    worst, attainable = max(lost, key=lambda name: lost[name]), sum(alone.values())
    return [
        *rows,
        row("iteration", measured.total, "s"),
        row("attainable iteration", attainable, "s"),
        row("achieved / attainable", attainable / measured.total, "1", against="speed, of the parts alone"),
        row(f"most is lost in {worst}", lost[worst], "s"),
    ]


def _make_ppo(experiment: Experiment, env: VectorEnv) -> PPO:
    """Every minibatch trains the policy, from the first iteration on."""
    config = experiment.algorithm
    if not isinstance(config, PPOConfig):
        raise UserError(f"bench train measures algorithm ppo, got {config.name}")
    config = replace(config, critic_warmup=0, rollout_shards=1, staleness=0)
    config = replace(config, update=replace(config.update, target_kl=None, adaptive_rate=False))
    rewarded = with_reward(experiment.reward, env, experiment_device(experiment))
    return PPO(config, untrained(experiment, env), rewarded, seed=experiment.seed)


def untrained(experiment: Experiment, env: VectorEnv) -> Policy:
    """The policy, or the bundle's, with the residual that the configuration puts on it."""
    device, start, robot = experiment_device(experiment), experiment.start, RobotSpec.of(env.spec)
    torch.manual_seed(experiment.seed)
    if isinstance(start, Imitation):
        policy = new_policy(start, robot, seed=experiment.seed, device=device)
    else:
        policy = load_bundle(start.path, robot=robot, device=device)
    return policy if start.residual is None else device.place(residual_on(policy, start.residual))
