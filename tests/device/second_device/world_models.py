"""World models: fits, evaluation and imagined rollouts."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from policies.denoising.action_expert import ActionExpertConfig
from policies.registry import build_policy
from sims.devices.crossing import crossing
from sims.devices.env_on_device import on_device
from tests import dot_episodes
from tests.device.second_device import DEVICE
from tests.device.small_models import FLOW, SECOND, UPDATE
from vla_rl.algorithms.ppo import PPO, PPOConfig
from vla_rl.bench.transfers import TransferCounter
from vla_rl.config.imagination import WorldModelConfig
from vla_rl.runners.iterations import algorithm_state, restore_algorithm
from vla_rl.runners.world_model import (
    WORLD_MODEL_FILE,
    fit_reward_model,
    make_imagined_env,
    open_clips,
    reference_error,
)
from vla_rl.runs.checkpoint import load_tree, save_tree
from world_models.bundle import load_world_model, save_world_model
from world_models.data.keyframes import KeyframeConfig, Keyframes
from world_models.evaluation.evaluate import WorldModelEvaluation
from world_models.registry import build_world_model
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig
from world_models.training.kinematics import KinematicsFit
from world_models.training.reward_model import RewardModelFit, imagine_observations

WORLD = WorldModelConfig(
    dynamics=dot_episodes.DYNAMICS,
    kinematics_steps=3,
    fit=DynamicsFitConfig(steps=4, batch_size=4, warmup=1, roll_in_from=0.0),
    reward_model=dataclasses.replace(dot_episodes.REWARD_MODEL, steps=3, batch_size=8, imagined_clips=8),
    imagined_env=dot_episodes.ImaginedEnvConfig(num_envs=4, reward_every=2),
)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The episodes, and a world model that was fitted to them on the second device: dynamics, then the reward model."""
    folder = tmp_path_factory.mktemp("world")
    store = dot_episodes.store(folder / "store", 40)
    clips = open_clips([store.path], WORLD.dynamics, "fit")
    calibration = open_clips([store.path], WORLD.dynamics, "calibration")
    with TransferCounter() as counter:
        torch.manual_seed(0)
        dynamics = SECOND.place(build_world_model(WORLD.dynamics, dot_episodes.ROBOT))
        with crossing("scales"):
            dynamics.fit_scales(*(part.to(DEVICE) for part in clips.statistics()))
        dot_episodes.finish(KinematicsFit(dynamics, clips, seed=0, steps=WORLD.kinematics_steps))
        dot_episodes.finish(DynamicsFit(dynamics, WORLD.fit, clips, seed=0))
        reward_model, metrics = fit_reward_model(
            WORLD, dynamics.eval(), clips, calibration, folder / "reward_model", seed=0, policy=None
        )
        reference = reference_error(dynamics, calibration, seed=0)
        path, every = folder / WORLD_MODEL_FILE, WORLD.imagined_env.reward_every
        save_world_model(dynamics, reward_model, path, reference_error=reference, metrics=metrics, reward_every=every)
    assert counter.unnamed == {}
    return store.path, folder


def test_world_model_evaluation(world: tuple[Path, Path]) -> None:
    store, folder = world
    fitted = load_world_model(folder / WORLD_MODEL_FILE, SECOND)
    assert fitted.dynamics.device == fitted.reward_model.device == DEVICE
    clips = open_clips([store], WORLD.dynamics, "held_out")
    evaluation = WorldModelEvaluation(reward_model=fitted.reward_model, clips=clips, reward_every=2, seed=0)
    report = evaluation.report(fitted.dynamics, env=None, no_action=None, locate=None, horizons=(1,), swaps=2)
    assert report["episodes"] == len(clips.entries)


def test_a_resumed_world_model_fit_is_the_same_fit(world: tuple[Path, Path], tmp_path: Path) -> None:
    store, folder = world
    clips, fits = open_clips([store], WORLD.dynamics, "fit"), []
    for _ in range(2):
        fitted = load_world_model(folder / WORLD_MODEL_FILE, SECOND)
        imagined = imagine_observations(fitted.dynamics, clips, fitted.reward_model.config, count=4, seed=0)
        parts = (
            DynamicsFit(fitted.dynamics.train(), WORLD.fit, clips, seed=0),
            RewardModelFit(fitted.reward_model, clips, imagined, seed=0),
        )
        fits.append(parts)
    assert not fits[0][0].optimizer.defaults["fused"]  # which not every device has
    for whole, resumed in zip(*fits, strict=True):
        whole.update()
        save_tree(tmp_path / "state.safetensors", whole.state_dict())
        expected = whole.update()
        resumed.load_state_dict(load_tree(tmp_path / "state.safetensors"))
        assert resumed.update() == expected


def test_ppo_in_imagined_rollouts(world: tuple[Path, Path]) -> None:
    store, folder = world
    fitted = load_world_model(folder / WORLD_MODEL_FILE, SECOND)
    keyframes = Keyframes(open_clips([store], WORLD.dynamics, "fit"), KeyframeConfig(), tasks=("go",))
    env = make_imagined_env(WORLD, fitted, keyframes, limits={"go": 8})
    assert env.spec.device == DEVICE
    assert on_device(env, DEVICE) is env
    torch.manual_seed(0)
    config = dataclasses.replace(FLOW, action_horizon=4, expert=ActionExpertConfig(depth=1, action_patch=4))
    policy = SECOND.place(build_policy(config, dot_episodes.ROBOT))
    learner = PPO(PPOConfig(chunks=2, critic_warmup=0, update=UPDATE), policy, env, seed=0)
    learner.iterate()
    with TransferCounter() as counter:
        learner.iterate()
    assert counter.unnamed == {}
    restore_algorithm(learner, algorithm_state(learner))
    learner.iterate()
