"""Proximal policy optimization over action chunks (Schulman et al. 2017): collect, advantages, a clipped update."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Literal

import torch

from policies.policy import Policy
from sims.devices.crossing import crossing
from sims.numbers.ranges import Count, PositiveInt, Share
from sims.numbers.seeding import spawn_seed
from sims.subproc.termination import interruptible
from sims.vector_env import VectorEnv
from vla_rl.algorithms.advantages import gae
from vla_rl.algorithms.algorithm import AlgorithmConfig, Metrics
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.on_policy import OnPolicy, ages
from vla_rl.algorithms.surrogate import explained_variance
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.critics.value import CriticConfig, ValueCritic
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.experience import Experience, reward_errors
from vla_rl.rollouts.sharded import MakeRollouts

TimeLimit = Literal["failure", "bootstrap"]


@dataclass(frozen=True, kw_only=True)
class PPOConfig(AlgorithmConfig):
    """``chunks``: chunks per environment and iteration. ``critic_warmup``: iterations that train the critic alone.

    ``time_limit``: what follows an episode that reaches it. "failure": nothing, as success within the limit is what is
    evaluated; "bootstrap": the value of its last observation, for tasks that go on (Pardo et al. 2018, Sec. 3.2).
    """

    name: Literal["ppo"] = "ppo"
    chunks: PositiveInt = 8
    gae_lambda: Share = 0.95
    critic_warmup: Count = 2
    time_limit: TimeLimit = "bootstrap"
    critic: CriticConfig = field(default_factory=CriticConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)

    def __post_init__(self) -> None:
        if 0 < self.iterations <= self.critic_warmup:
            raise ValueError(
                f"critic_warmup must be below iterations ({self.iterations}), or the policy is never trained, "
                f"got {self.critic_warmup}"
            )


class PPO(OnPolicy):
    """One iteration: a rollout of every environment, advantages, a clipped update of policy and critic."""

    def __init__(
        self,
        config: PPOConfig,
        policy: Policy,
        env: VectorEnv,
        *,
        seed: int,
        make_rollouts: MakeRollouts = Collector,
    ) -> None:
        self.config = config
        torch.manual_seed(spawn_seed(seed, "critic"))
        with crossing("weights"):
            critic = ValueCritic(config.critic, policy.spec.value_dim).to(policy.device)
        update = ClippedUpdate(config.update, policy, critic=critic, seed=spawn_seed(seed, "minibatches"))
        collector = make_rollouts(
            env,
            policy,
            critic=critic,
            gamma=config.gamma,
            failure_weight=config.failure_weight,
            seed=seed,
            kept=(1 + config.staleness) * config.chunks * env.spec.num_envs,
        )
        super().__init__(policy, collector, update)

    def iterate(self) -> Metrics:
        config, collector = self.config, self.collector
        with interruptible():
            rollout = collector.collect(config.chunks)
        collected = {
            "success": rollout.success_rate(),
            "control_steps": float(rollout.control_steps()),
            **reward_errors([rollout.reward_counts()]),
        }
        batch = with_advantages(rollout, gamma=config.gamma, gae_lambda=config.gae_lambda, time_limit=config.time_limit)
        del rollout  # the update needs the memory
        with collector.timer.section("learn"):
            metrics = self.update.run(
                batch,
                train_policy=self.iteration >= config.critic_warmup and _any_own(batch),
                version=self.iteration if config.staleness else None,
            )
        self.iteration += 1
        self.publish()
        if config.staleness and len(batch):
            metrics |= ages(self.iteration - 1 - batch.policy_version)
        return metrics | spread(batch) | collected | collector.timer.take()


def _any_own(batch: Experience) -> bool:
    with crossing("metrics"):
        return bool(batch.own.any())


def spread(batch: Experience) -> Metrics:
    """How well the critic explains the returns, and the standard deviation of the advantages; empty of no chunks."""
    assert batch.advantage is not None and batch.value_target is not None
    if not len(batch):
        return {}
    with crossing("metrics"):
        return {
            "explained_variance": explained_variance(batch.value, batch.value_target),
            "advantage_std": batch.advantage.std(correction=min(1, len(batch) - 1)).item(),
        }


def with_advantages(
    rollout: Experience, *, gamma: float, gae_lambda: float, time_limit: TimeLimit = "bootstrap"
) -> Experience:
    """The valid chunks of ``rollout`` [T, N], flat, with advantages and value targets.

    Those that a person acted have weight 0: they train the critic, and not the policy, which drew other actions.
    """
    timed_out, own = rollout.truncated & rollout.valid, rollout.own
    weight = own * (rollout.valid.sum() / own.sum().clamp(min=1))
    advantage = gae(
        reward=rollout.reward,
        value=rollout.value,
        next_value=rollout.next_value,
        terminated=rollout.terminated | timed_out if time_limit == "failure" else rollout.terminated,
        truncated=rollout.truncated,
        discount=gamma ** rollout.num_executed.float(),
        gae_lambda=gae_lambda,
    )
    return dataclasses.replace(
        rollout, advantage=advantage, value_target=advantage + rollout.value, weight=weight
    ).valid_chunks()
