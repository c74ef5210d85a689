"""Everything that changes while a policy improves, and its exact state."""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any

import torch

from policies.denoising.policy import DenoisingPolicy
from sims.vector_env import StartState, VectorEnv
from vla_rl.algorithms.grpo import GRPO, GRPOConfig
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.update import Metrics, PolicyUpdate
from vla_rl.critics.value import ValueCritic
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.groups import collect_groups
from vla_rl.rollouts.starts import TrainingStarts
from vla_rl.runs.metrics import Timer


class Learner:
    """Collects with ``policy`` in ``env`` and updates it; ``state_dict`` / ``load_state_dict`` are exact."""

    def __init__(
        self, policy: DenoisingPolicy, env: VectorEnv, algorithm: PPOConfig | GRPOConfig, *, seed: int
    ) -> None:
        self.policy, self.env, self.config, self.iteration = policy, env, algorithm, 0
        torch.manual_seed(seed)  # the critic's initial weights
        critic_config = algorithm.critic if isinstance(algorithm, PPOConfig) else None
        self.critic = ValueCritic(critic_config, policy.value_dim) if critic_config is not None else None
        self.timer = Timer()
        self._explore = torch.Generator().manual_seed(seed)
        self._shuffle = torch.Generator().manual_seed(seed + 1)
        self.collector = Collector(
            env,
            policy,
            critic=self.critic,
            gamma=algorithm.gamma,
            keep_context=not algorithm.update.train_encoder,
            generator=self._explore,
            timer=self.timer,
        )
        self.starts = TrainingStarts(seed=seed, num_tasks=len(env.spec.tasks), failure_weight=algorithm.failure_weight)
        self.update = PolicyUpdate(
            policy,
            config=algorithm.update,
            reference=copy.deepcopy(policy) if algorithm.update.reference_weight else None,
            critic=self.critic,
            critic_config=critic_config,
            generator=self._shuffle,
        )
        self.collector.start(self.starts.take(env.spec.num_envs))

    def iterate(self) -> Metrics:
        """Collect, learn, count."""
        metrics = self._ppo(self.config) if isinstance(self.config, PPOConfig) else self._grpo(self.config)
        self.iteration += 1
        self.collector.policy_version = self.iteration
        return metrics | self.timer.take()

    def _ppo(self, config: PPOConfig) -> Metrics:
        rollout = self.collector.collect(config.chunks, self.starts)
        self.starts.learn(rollout)
        with self.timer.section("learn"):
            metrics = PPO(config, self.update).update(rollout, self.iteration)
        return metrics | {"success": rollout.success_rate(), "control_steps": float(rollout.control_steps())}

    def _grpo(self, config: GRPOConfig) -> Metrics:
        groups = collect_groups(self.collector, self.starts, config)
        with self.timer.section("learn"):
            metrics = GRPO(config, self.update).update(groups.rollouts)
        return metrics | {
            "success": groups.success,
            "control_steps": float(groups.control_steps),
            "groups_drawn": float(groups.drawn),
            "groups_informative": float(groups.informative),
        }

    def deployed(self) -> DenoisingPolicy:
        """The policy that is evaluated and shipped: the moving average where one is kept."""
        return self.update.averaged or self.policy

    def state_dict(self) -> dict[str, Any]:
        return {
            "iteration": self.iteration,
            "policy": self.policy.state_dict(),
            "critic": self.critic.state_dict() if self.critic is not None else None,
            "update": self.update.state_dict(),
            "explore": self._explore.get_state(),
            "starts": self.starts.state_dict(),
            "env": [asdict(start) for start in self.env.capture()],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = self.collector.policy_version = state["iteration"]
        self.policy.load_state_dict(state["policy"])
        if self.critic is not None:
            self.critic.load_state_dict(state["critic"])
        self.update.load_state_dict(state["update"])
        self._explore.set_state(state["explore"])
        self.starts.load_state_dict(state["starts"])
        self.collector.start([StartState(**start) for start in state["env"]])
