"""Proximal policy optimization over action chunks (Schulman et al. 2017)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from vla_rl.algorithms.advantages import gae
from vla_rl.algorithms.surrogate import explained_variance
from vla_rl.algorithms.update import Batch, Metrics, PolicyUpdate, UpdateConfig
from vla_rl.critics.value import CriticConfig
from vla_rl.rollouts.rollout import Rollout


@dataclass(frozen=True, kw_only=True)
class PPOConfig:
    """``chunks``: chunks per row and iteration. ``critic_warmup``: iterations that train the critic alone.

    ``failure_weight`` in [0, 1): how much more often tasks are practised that still fail (rollouts/starts.py).
    """

    name: Literal["ppo"] = "ppo"
    iterations: int = 60
    chunks: int = 8
    gamma: float = 0.99
    gae_lambda: float = 0.95
    failure_weight: float = 0.0
    critic_warmup: int = 2
    critic: CriticConfig = field(default_factory=CriticConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)


def ppo_batch(rollout: Rollout, *, gamma: float, gae_lambda: float) -> Batch:
    """Advantages and value targets of every valid chunk, flattened."""
    discount = gamma ** rollout.num_executed.float()
    advantage = gae(
        reward=rollout.reward,
        value=rollout.value,
        next_value=rollout.next_value,
        terminated=rollout.terminated,
        truncated=rollout.truncated,
        discount=discount,
        gae_lambda=gae_lambda,
    )
    chunks, advantage = rollout[rollout.valid], advantage[rollout.valid]
    return Batch(
        inputs=chunks.inputs,
        path=chunks.path,
        log_prob=chunks.log_prob,
        num_executed=chunks.num_executed,
        advantage=advantage,
        weight=torch.ones_like(advantage),
        value=chunks.value,
        value_target=advantage + chunks.value,
    )


class PPO:
    """One iteration's learning step."""

    def __init__(self, config: PPOConfig, update: PolicyUpdate) -> None:
        self.config, self._update = config, update

    def update(self, rollout: Rollout, iteration: int) -> Metrics:
        batch = ppo_batch(rollout, gamma=self.config.gamma, gae_lambda=self.config.gae_lambda)
        assert batch.value is not None and batch.value_target is not None
        metrics = self._update.run(batch, train_policy=iteration >= self.config.critic_warmup)
        return metrics | {
            "explained_variance": explained_variance(batch.value, batch.value_target),
            "advantage_std": batch.advantage.std().item(),
        }
