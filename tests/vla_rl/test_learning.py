"""Behavior cloning, PPO and language use in a small environment."""

import copy
from pathlib import Path

import pytest
import torch

from episodes.recorder import RecordedEnv, keep_successes
from episodes.sampler import WindowSampler
from episodes.store import EpisodeStore
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec
from sims.starts import StartSequence
from tests.worlds import PointEnv
from vla_rl.algorithms.bc import BC, BCConfig
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.config.controls import Control
from vla_rl.runners.demonstrations import Attempts, run_expert
from vla_rl.runners.evaluate import evaluate_policy

SMALL = CompactEncoderConfig(width=96, text_width=32)


@pytest.fixture(scope="module")
def imitator(tmp_path_factory: pytest.TempPathFactory) -> DenoisingPolicy:
    """Cloned from a noisy expert."""
    torch.set_num_threads(1)
    world = PointEnv(num_envs=50)
    store = EpisodeStore(Path(tmp_path_factory.mktemp("demonstrations")), create=True)
    recorder = RecordedEnv(world, store, source="expert", split="train", keep=keep_successes)
    starts = StartSequence("demos", seed=0, num_tasks=3)
    expert = world.expert(noise=0.5, seed=0)
    run_expert(
        recorder,
        expert,
        starts,
        Attempts(len(recorder.spec.tasks)),
        episodes=200,
        observe_every=1,
        on_recorded=lambda count: None,
    )
    assert recorder.recorded == 200
    sampler = WindowSampler(store, action_horizon=8, future_steps=SMALL.forecast_steps, batch_size=128, seed=0)
    torch.manual_seed(0)
    policy = DenoisingPolicy(DenoisingPolicyConfig(encoder=SMALL), RobotSpec.of(world.spec))
    policy.normalizer.fit(*sampler.statistics())
    learner = BC(policy, BCConfig(steps=250, learning_rate=2e-3), [sampler], seed=0)
    for _ in range(250):
        learner.update()
    return policy


def success(policy: DenoisingPolicy, control: Control = "none") -> float:
    world = PointEnv(num_envs=50)
    starts = StartSequence("evaluation", seed=0, num_tasks=3).take(150)
    return evaluate_policy(policy, world, starts, seed=0, stochastic=False, control=control)["success"]


@pytest.fixture(scope="module")
def cloned(imitator: DenoisingPolicy) -> float:
    """Success of the imitator, before anything improves it."""
    return success(imitator)


def test_without_its_instruction_the_policy_falls_to_chance(imitator: DenoisingPolicy, cloned: float) -> None:
    """Three squares look alike but for their color: chance is a third of what it can do."""
    assert cloned > 0.5
    assert success(imitator, "blank_instruction") < 0.6 * cloned
    assert success(imitator, "shuffled_instruction") < 0.65 * cloned


def test_ppo_improves_the_cloned_policy(imitator: DenoisingPolicy, cloned: float) -> None:
    config = PPOConfig(
        iterations=15,
        chunks=8,
        critic_warmup=1,
        update=UpdateConfig(learning_rate=1e-4, minibatch=256, micro_batch=256, epochs=3),
    )
    learner = PPO(config, copy.deepcopy(imitator), PointEnv(num_envs=96), seed=0)
    for _ in range(config.iterations):
        learner.iterate()
    failures = 1 - success(learner.deployed())
    assert failures < 0.75 * (1 - cloned)
