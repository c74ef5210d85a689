"""Behavior cloning of few noisy demonstrations, then PPO or GRPO, for any policy in a small environment."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from episodes.recorder import RecordedEnv, keep_successes
from episodes.sampler import WindowSampler
from episodes.store import EpisodeStore
from policies.device import CPU, Device
from policies.policy import Policy, RobotSpec
from policies.registry import build_policy
from sims.starts import StartSequence
from sims.vector_env import VectorEnv
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.algorithms.registry import build_algorithm
from vla_rl.runners.demonstrations import Attempts, run_expert
from vla_rl.runners.evaluate import evaluate_policy


def clone(
    config: Any,
    make_env: Callable[..., Any],
    *,
    episodes: int,
    steps: int,
    seed: int,
    noise: float = 0.8,
    frozen: Sequence[str] = (),
    prepare: Callable[[Policy], None] = lambda policy: None,
    device: Device = CPU,
) -> Policy:
    """``steps`` updates on ``episodes`` demonstrations with much action noise.

    ``prepare``: the new policy, before anything is cloned, on the CPU.
    """
    train = make_env(num_envs=20)
    with tempfile.TemporaryDirectory() as folder:
        store = EpisodeStore(Path(folder) / "store", create=True)
        recorder = RecordedEnv(train, store, source="expert", split="train", keep=keep_successes)
        starts = StartSequence("demos", seed=seed, num_tasks=len(train.spec.tasks))
        expert = train.expert(noise=noise, seed=seed)
        run_expert(
            recorder,
            expert,
            starts,
            Attempts(len(recorder.spec.tasks)),
            episodes=episodes,
            observe_every=1,
            on_recorded=lambda count: None,
        )
        torch.manual_seed(seed)
        policy = build_policy(config, RobotSpec.of(train.spec))
        prepare(policy)
        spec = policy.spec
        sampler = WindowSampler(
            store,
            action_horizon=spec.cloned_horizon,
            future_steps=spec.future_steps,
            past_steps=spec.past_steps,
            batch_size=64,
            seed=seed,
        )
        policy.fit_normalizer(*sampler.statistics())
        device.place(policy)
        bc = BC(
            policy, BCConfig(steps=steps, learning_rate=2e-3, batch_size=64, frozen=tuple(frozen)), [sampler], seed=seed
        )
        for _ in range(steps):
            bc.update()
    return policy


def improve(
    policy: Policy,
    env: VectorEnv,
    algorithm: Any,
    *,
    seed: int,
    on_iteration: Callable[[dict[str, float]], None] = lambda metrics: None,
) -> Policy:
    learner = build_algorithm(algorithm, policy, env, seed=seed)
    for _ in range(algorithm.iterations):
        on_iteration(learner.iterate())
    return learner.deployed()


def success(policy: Policy, make_env: Callable[..., VectorEnv], *, episodes: int = 300, num_envs: int = 100) -> float:
    """Of the deployed policy on held-out starts."""
    env = make_env(num_envs=num_envs)
    starts = StartSequence("evaluation", seed=0, num_tasks=len(env.spec.tasks)).take(episodes)
    return float(evaluate_policy(policy, env, starts, seed=0, stochastic=False)["success"])
