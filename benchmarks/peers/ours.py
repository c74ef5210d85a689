"""This project's PPO at the size of a ``Work``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from benchmarks.peers.denoising_mlp import DenoisingMLP, DenoisingMLPConfig
from benchmarks.peers.pace import Pace
from benchmarks.peers.work import Kind, Work
from policies.denoising.kernels import DDIMConfig, DDPMConfig, FlowNoiseConfig, FlowODEConfig
from policies.denoising.objectives import DiffusionConfig, FlowMatchingConfig
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import Policy, RobotSpec
from sims.adapters.gymnasium import GymnasiumConfig
from sims.registry import make_env
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.critics.value import CriticConfig
from vla_rl.rollouts.collector import Collector
from vla_rl.rollouts.experience import Experience

CLIP = {"clip_low": 0.01, "clip_high": 0.01}
LOSSES: Mapping[Kind, Mapping[str, Any]] = {
    "gaussian": {"learning_rate": 3e-4, "max_grad_norm": 0.5},
    "diffusion": {"learning_rate": 1e-4, "reduction": "step_mean", "denoising_discount": 0.99, **CLIP},
    "flow": {"learning_rate": 4.5e-5, "reduction": "chunk_mean", "entropy_weight": 0.03, **CLIP},
}
ROWS_AT_ONCE = 2_500  # network evaluations of a backward pass: their activations stay in the cache


def run(pace: Pace, work: Work) -> None:
    torch.manual_seed(0)
    env = make_env(simulator(work))
    try:
        ppo = PPO(
            algorithm(work),
            POLICIES[work.kind](work, RobotSpec.of(env.spec)),
            env,
            seed=0,
            make_rollouts=lambda *given, **settings: _Rollouts(pace, *given, **settings),
        )
        assert isinstance(ppo.update, ClippedUpdate)
        pace.count(ppo.update.optimizer)
        while True:
            pace.begin()
            ppo.iterate()
    finally:
        env.close()


class _Rollouts(Collector):
    """Says when a rollout is over."""

    def __init__(self, pace: Pace, *given: object, **settings: object) -> None:
        super().__init__(*given, **settings)  # type: ignore[arg-type]
        self.pace = pace

    def collect(self, num_chunks: int) -> Experience:
        rollout = super().collect(num_chunks)
        self.pace.rolled_out()
        return rollout


def simulator(work: Work) -> GymnasiumConfig:
    return GymnasiumConfig(
        id=work.env_id,
        num_envs=work.num_envs,
        reward="shaped",
        success="terminated",
        max_steps=work.max_steps,
    )


def algorithm(work: Work) -> PPOConfig:
    """The same loss as the peer's: DPPO clips every denoising step, ReinFlow and a Gaussian policy the whole decision.

    No target KL: every gradient step is taken.
    """
    at_once = min(ROWS_AT_ONCE // work.trained_steps, work.minibatch)
    micro_batch = next(n for n in range(at_once, 0, -1) if work.minibatch % n == 0)
    return PPOConfig(
        iterations=1_000_000,
        chunks=work.decisions,
        critic_warmup=0,
        critic=CriticConfig(hidden=work.critic_hidden, value_clip=None),
        update=UpdateConfig(
            epochs=work.epochs,
            minibatch=work.minibatch,
            micro_batch=micro_batch,
            target_kl=None,
            dual_clip=None,
            **LOSSES[work.kind],
        ),
    )


def _gaussian(work: Work, robot: RobotSpec) -> Policy:
    return GaussianPolicy(GaussianPolicyConfig(action_horizon=work.horizon, hidden=work.hidden, initial_std=1.0), robot)


def _diffusion(work: Work, robot: RobotSpec) -> Policy:
    steps = work.denoising_steps
    config = DenoisingMLPConfig(
        action_horizon=work.horizon,
        hidden=work.hidden,
        objective=DiffusionConfig(levels=steps),
        act=DDIMConfig(steps=steps),
        explore=DDPMConfig(steps=steps, train_last=work.trained_steps),
    )
    return DenoisingMLP(config, robot)


def _flow(work: Work, robot: RobotSpec) -> Policy:
    steps = work.denoising_steps
    config = DenoisingMLPConfig(
        action_horizon=work.horizon,
        hidden=work.hidden,
        objective=FlowMatchingConfig(),
        act=FlowODEConfig(steps=steps),
        explore=FlowNoiseConfig(steps=steps, min_std=0.10, max_std=0.24),
    )
    return DenoisingMLP(config, robot)


POLICIES: Mapping[Kind, Callable[[Work, RobotSpec], Policy]] = {
    "gaussian": _gaussian,
    "diffusion": _diffusion,
    "flow": _flow,
}
