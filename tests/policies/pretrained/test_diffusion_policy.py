"""Diffusion Policy against LeRobot (a golden file), its memory, its log-probs, what of a chunk is executed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from episodes.sampler import WindowSampler
from episodes.store import EpisodeStore
from policies.denoising.denoise import integrate
from policies.denoising.kernels import DDIMConfig, DDPMConfig, build_kernel
from policies.denoising.objectives import DiffusionConfig
from policies.policy import Policy, RobotSpec, set_frozen
from policies.pretrained.checkpoint import CheckpointError, PublishedWeights, Scale
from policies.pretrained.diffusion_policy.config import DiffusionPolicyConfig, UNetConfig
from policies.pretrained.diffusion_policy.policy import DiffusionChunkPolicy
from policies.registry import build_policy
from policies.residual.policy import ResidualConfig, residual_on
from sims.errors import UserError
from sims.vector_env import Observation, encode_instructions
from tests.episodes.episode_examples import make_episode
from tests.policies.pretrained.golden import read_golden
from tests.policies.pretrained.log_probs import FROZEN, log_prob_difference
from tests.policies.pretrained.toy import DIFFUSION_POLICY, DIFFUSION_TRANSFORMER
from tests.policies.test_every_policy import ROBOT as SMALL_ROBOT
from tests.policies.test_every_policy import observe
from vla_rl.algorithms.encoded_windows import encode_windows
from vla_rl.replay.demonstrations import recorded_chunk_sequences, replay_of
from vla_rl.runners.imitation import CloningSource, window_samplers

ROBOT = RobotSpec(action_dim=7, state_dim=8, cameras=("a", "b"), image_size=(64, 64), control_hz=10.0)
TINY = DiffusionPolicyConfig(
    network=UNetConfig(widths=(32, 64), time_width=32),
    keypoints=8,
    crop=56,
    objective=DiffusionConfig(levels=20),
    act=DDIMConfig(steps=20),
    explore=DDIMConfig(steps=20, eta=1.0, train_last=5),
)
GOLDEN = read_golden("diffusion_policy", norms_around=1.0)
BOTH = pytest.mark.parametrize("config", [DIFFUSION_POLICY, DIFFUSION_TRANSFORMER], ids=["unet", "transformer"])


def load(weights: dict[str, torch.Tensor]) -> tuple[DiffusionChunkPolicy, list[str]]:
    policy = DiffusionChunkPolicy(TINY, ROBOT).eval()
    state, action = (Scale(center=torch.zeros(size), scale=torch.ones(size)) for size in (8, 7))
    published = PublishedWeights(tensors=weights, state=state, action=action, tokenizer=b"", source="file")
    return policy, policy.load_published(published)


def test_what_is_deployed_draws_no_noise() -> None:
    with pytest.raises(ValueError, match="act must be deterministic"):
        DiffusionChunkPolicy(replace(TINY, act=DDIMConfig(steps=20, eta=1.0)), ROBOT)


@torch.no_grad()
def difference_to_lerobot() -> float:
    """After two observations, through the policy's memory; the means of DDPM's steps, from the present action on."""
    policy, dead = load(GOLDEN.weights)
    assert dead == ["diffusion.rgb_encoder.pool.pos_grid"]
    state: Any = policy.initial_state(2)
    for i in range(2):
        obs = Observation(
            images=GOLDEN.inputs["images"][:, i],
            state=GOLDEN.inputs["state"][:, i],
            instruction=encode_instructions(["push"] * 2),
        )
        context, state = policy.encode(obs, state)
    kernel = build_kernel(DDPMConfig(steps=20, train_last=1), policy.objective)
    chunk = integrate(policy.predict(context), kernel, GOLDEN.inputs["noise"])
    return (chunk[:, policy.executed] - GOLDEN.outputs["action"]).abs().max().item()


def exploring(config: DiffusionPolicyConfig) -> Policy:
    torch.manual_seed(0)
    return build_policy(replace(config, explore=replace(config.explore, min_std=0.1)), SMALL_ROBOT)


def test_the_same_weights_give_lerobots_actions() -> None:
    assert difference_to_lerobot() <= 5e-5


def test_a_checkpoint_of_other_sizes_stops() -> None:
    weights = dict(GOLDEN.weights)
    weights["diffusion.unet.final_conv.1.bias"] = torch.zeros(4)
    with pytest.raises(CheckpointError, match=r"final_conv\.1\.bias \[4\], expected \[7\]"):
        load(weights)


def test_a_crop_that_is_larger_than_the_images_is_refused() -> None:
    for size in ((64, 96), (96, 64)):
        robot = replace(ROBOT, image_size=size)
        message = rf"policy.crop is 65 pixels, but the robot's images are {size[0]}x{size[1]}: .* at most 64, or null"
        with pytest.raises(UserError, match=message):
            build_policy(replace(TINY, crop=65), robot)
        build_policy(replace(TINY, crop=64), robot)


@BOTH
def test_an_episode_begins_with_its_first_observation_repeated(config: DiffusionPolicyConfig) -> None:
    policy: Any = build_policy(config, SMALL_ROBOT)
    first, second = observe(3, seed=1), observe(3, seed=2)
    context, memory = policy.encode(first, policy.initial_state(3))
    assert torch.equal(context.history.images[:, 0], context.history.images[:, 1])
    context, _ = policy.encode(second, memory)
    assert torch.equal(context.history.images[:, 0], first.images)
    assert torch.equal(context.history.images[:, 1], second.images)


@BOTH
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_log_probs_are_those_of_the_rollout(config: DiffusionPolicyConfig, frozen: tuple[str, ...]) -> None:
    assert log_prob_difference(exploring(config), frozen) <= 1e-5


def test_later_actions_do_not_change_earlier_ones_in_the_transformer() -> None:
    policy: Any = build_policy(DIFFUSION_TRANSFORMER, SMALL_ROBOT)
    context, _ = policy.encode(observe(1), policy.initial_state(1))
    x = torch.randn(1, 1, 16, 3)
    changed = x.clone()
    changed[:, :, 9] += 1
    before, after = (policy.predict(context)(one, torch.tensor([[0.5]])).target[0, 0] for one in (x, changed))
    assert torch.equal(before[:9], after[:9]) and (before[9:] - after[9:]).abs().max() > 1e-4


HISTORIES = {
    0: [0, 0, 0],
    3: [0, 0, 3],
    8: [0, 0, 8],
    11: [0, 3, 11],
    16: [0, 8, 16],
    19: [3, 11, 19],
}  # by present step


def observed_everywhere(path: Path) -> tuple[EpisodeStore, RobotSpec]:
    """An episode of 20 control steps whose state says in element 1 of which step it is."""
    store = EpisodeStore(path, create=True)
    store.add(make_episode(steps=20))
    return store, RobotSpec(action_dim=3, state_dim=4, cameras=("front",), image_size=(8, 8), control_hz=20.0)


@pytest.mark.parametrize("frozen", [("encoder",), ()], ids=["encoded once", "encoded again"])
@pytest.mark.parametrize("residual", [False, True])
def test_cloning_sees_the_decisions_that_a_rollout_remembers(
    tmp_path: Path, residual: bool, frozen: tuple[str, ...]
) -> None:
    store, robot = observed_everywhere(tmp_path / "store")
    policy: Any = build_policy(replace(DIFFUSION_POLICY, obs_steps=3), robot)
    set_frozen(policy, frozen)
    policy = residual_on(policy, ResidualConfig(action_horizon=4)) if residual else policy
    (sampler,) = window_samplers(policy.spec, [CloningSource(store=store.path)], batch_size=8, seed=0)
    inputs: Any = encode_windows(policy, sampler, np.array(list(HISTORIES))).inputs
    features = policy.restore(inputs).features.reshape(len(HISTORIES), 3, -1)
    assert features[:, :, 1].tolist() == list(HISTORIES.values())


def test_a_replay_of_recorded_episodes_sees_the_decisions_that_a_rollout_remembers(tmp_path: Path) -> None:
    store, robot = observed_everywhere(tmp_path / "store")
    policy: Any = build_policy(replace(DIFFUSION_POLICY, obs_steps=3), robot)
    found = recorded_chunk_sequences([store.path], action_horizon=8, gamma=0.9)
    first = WindowSampler(store, action_horizon=8, batch_size=1, seed=0, cameras=("front",)).next_batch().obs
    example = policy.store(policy.encode(first, policy.initial_state(1))[0])
    inputs: Any = replay_of(found, policy, example, gamma=0.9, seed=0).entries().inputs
    seen = inputs.state[..., 1].tolist()
    assert [history for history in seen if history[-1] in HISTORIES] == [HISTORIES[at] for at in (0, 8, 16, 3, 11, 19)]
