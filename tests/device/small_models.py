"""Policies, algorithms and episodes that the tests on the second device share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from episodes.recorder import RecordedEnv, keep_successes
from episodes.store import EpisodeStore
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.kernels import DDIMConfig, FlowNoiseConfig
from policies.denoising.objectives import DiffusionConfig
from policies.denoising.policy import DenoisingPolicyConfig
from policies.device import Device, select_device
from policies.policy import Policy, RobotSpec
from policies.registry import build_policy
from policies.residual.ensemble import EnsembleConfig
from policies.residual.histogram import HistogramConfig
from policies.residual.policy import ResidualConfig, SquashedNoiseConfig, residual_on
from sims.starts import StartSequence
from tests.device.second_device import DEVICE
from tests.rewards.small_classifier import ALWAYS, untrained
from tests.worlds import PointEnv
from vla_rl.algorithms.algorithm import Algorithm
from vla_rl.algorithms.grpo import GRPO, GRPOConfig, GRPOUpdateConfig
from vla_rl.algorithms.off_policy import OffPolicy
from vla_rl.algorithms.off_policy_settings import EntropyConfig, OffPolicyConfig, RecapConfig
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.rewards.classified_env import ClassifiedEnv
from vla_rl.rewards.scorer import sensors_of
from vla_rl.rollouts.ahead import make_ahead
from vla_rl.rollouts.collector import Collector
from vla_rl.runners.demonstrations import Attempts, run_expert

SECOND = select_device("fakegpu")
ENCODER = CompactEncoderConfig(width=32, text_width=16, image_widths=(8,), queries=2, query_heads=2)
EXPERT = ActionExpertConfig(depth=1)
FLOW = DenoisingPolicyConfig(encoder=ENCODER, expert=EXPERT)
NOISY = dataclasses.replace(FLOW, explore=FlowNoiseConfig())
DPPO = DenoisingPolicyConfig(
    encoder=ENCODER,
    expert=EXPERT,
    objective=DiffusionConfig(),
    act=DDIMConfig(),
    explore=DDIMConfig(eta=1.0, train_last=2),
)
UPDATE = UpdateConfig(
    minibatch=8, micro_batch=4, epochs=1, average=0.9, entropy_weight=0.01, reference_weight=0.1, target_kl=None
)
STEPWISE = UpdateConfig(
    minibatch=8, micro_batch=4, epochs=1, reduction="step_mean", denoising_discount=0.9, clip_first_step=0.01
)
GROUPS = GRPOConfig(
    groups=2,
    group_size=2,
    min_success=0.0,
    max_success=1.0,
    update=GRPOUpdateConfig(minibatch=8, micro_batch=8, epochs=1, reference_weight=0.1),
)
ALGORITHMS: dict[str, Callable[[Policy, PointEnv], Algorithm]] = {
    "ppo": lambda policy, env: PPO(PPOConfig(chunks=2, critic_warmup=0, update=UPDATE), policy, env, seed=1),
    "dppo": lambda policy, env: PPO(PPOConfig(chunks=2, critic_warmup=0, update=STEPWISE), policy, env, seed=1),
    "grpo": lambda policy, env: GRPO(GROUPS, policy, env, seed=1),
}
CRITIC = EnsembleConfig(hidden=(16,), members=3)
OFF_POLICY = OffPolicyConfig(
    chunks=4,
    warmup=8,
    warmup_noise=0.1,
    critic_warmup=2,
    batch_size=16,
    utd_ratio=0.25,
    demonstration_share=0.0,
    critic=CRITIC,
)
TD3 = ResidualConfig(action_horizon=4, hidden=(16,))
SAC = dataclasses.replace(TD3, noise=SquashedNoiseConfig(), encoder=ENCODER)
RECAP = RecapConfig(histogram=HistogramConfig(bins=11, low=0.0, high=1.0))
ALGORITHMS |= {
    "off_policy_td3": lambda policy, env: OffPolicy(OFF_POLICY, residual_on(policy, TD3), env, seed=1),
    "off_policy_sac": lambda policy, env: OffPolicy(
        dataclasses.replace(OFF_POLICY, entropy=EntropyConfig()), residual_on(policy, SAC), env, seed=1
    ),
    "off_policy_ahead": lambda policy, env: OffPolicy(
        dataclasses.replace(OFF_POLICY, staleness=1),
        residual_on(policy, TD3),
        env,
        seed=1,
        make_rollouts=make_ahead(Collector, 1),
    ),
    "off_policy_recap": lambda policy, env: OffPolicy(
        dataclasses.replace(OFF_POLICY, recap=RECAP, warmup_noise=0.0), policy, env, seed=1
    ),
}
SIDES = {"environment on the host": torch.device("cpu"), "environment on the device": DEVICE}


def policy_of(env: PointEnv, device: Device, config: Any = FLOW) -> Policy:
    torch.manual_seed(0)
    policy = build_policy(config, RobotSpec.of(env.spec))
    policy.prepare_to_explore()
    return device.place(policy)


def algorithm(name: str, device: Device, side: torch.device) -> Algorithm:
    env = PointEnv(num_envs=4, max_steps=24, device=side)
    return ALGORITHMS[name](policy_of(env, device, {"ppo": NOISY, "dppo": DPPO}.get(name, FLOW)), env)


def weights(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu() for name, tensor in policy.state_dict().items()}


def same_weights(one: Policy, other: Policy) -> bool:
    """Bit for bit."""
    expected, found = weights(one), weights(other)
    return expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def rewarded(device: Device, side: torch.device) -> Algorithm:
    """PPO whose only reward is a classifier that always declares success at its second classified observation."""
    env = PointEnv(num_envs=4, max_steps=24, device=side)
    model = device.place(untrained(sensors_of(env.spec), threshold=ALWAYS, every=2, consecutive=2))
    return ALGORITHMS["ppo"](policy_of(env, device, NOISY), ClassifiedEnv(env, model))


def record(env: PointEnv, store: EpisodeStore) -> None:
    recorder = RecordedEnv(env, store, source="expert", split="train", keep=keep_successes)
    starts, attempts = StartSequence("demos", seed=0, num_tasks=3), Attempts(3)
    expert = env.expert(noise=0.3, seed=0)
    run_expert(recorder, expert, starts, attempts, episodes=4, observe_every=2, on_recorded=lambda count: None)
