"""Fit a world model to recorded episodes, evaluate it, and make environments of it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from episodes.catalog import Entry
from episodes.store import EVERYTHING, EpisodeStore
from policies.device import CPU, Device, make_generator
from policies.policy import Policy, RobotSpec
from sims.devices.crossing import crossing
from sims.numbers.seeding import spawn_seed
from sims.registry import EnvConfig, object_locator
from sims.vector_env import EnvSpec, VectorEnv
from vla_rl.config.imagination import WorldModelConfig
from vla_rl.config.loader import flat_settings
from vla_rl.runners.checks import check_tasks
from vla_rl.runners.fit import fit_folder, run_fit
from vla_rl.runners.imitation import recorded_robot
from vla_rl.runners.world_model_videos import write_evaluation_videos
from world_models.bundle import FittedWorldModel, WorldModelInfo, check_robot, load_world_model, save_world_model
from world_models.data.clip import Part, first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.data.keyframes import ImaginedStarts
from world_models.evaluation.divergence import Divergence, reference_image_difference
from world_models.evaluation.evaluate import WorldModelEvaluation
from world_models.evaluation.imagined_success import set_thresholds
from world_models.imagined_env import ImaginedEnv
from world_models.models.autoencoder import Autoencoder
from world_models.models.flow_model import FlowWorldModel
from world_models.registry import DynamicsConfig, build_world_model
from world_models.reward_model import RewardModel, taken_digest
from world_models.training.autoencoder import AutoencoderFit
from world_models.training.distillation import Distillation
from world_models.training.dynamics import DynamicsFit
from world_models.training.kinematics import KinematicsFit
from world_models.training.reward_model import (
    RewardModelFit,
    imagine_observations,
    set_failed_threshold,
    success_observations,
)
from world_models.world_model import WorldModelError

WORLD_MODEL_FILE = "world.safetensors"
EPISODES, CLONE = "episodes", "clone"  # folders of a round of training in imagination, beside its world model
# Settings that may change without another fit.
USE_SETTINGS = ("keyframes", "imagined_env", "no_action_steps")
REFERENCE_QUANTILE = 0.9  # of the model's own error estimates after one prediction: the reference


def open_clips(
    stores: Sequence[Path], dynamics: DynamicsConfig, part: Part, *, cameras: Sequence[str] | None = None
) -> ClipSampler:
    """``cameras``: in this order; None: all, as first recorded."""
    opened = [EpisodeStore(path) for path in stores]
    return ClipSampler(opened, action_horizon=dynamics.action_horizon, cameras=cameras, part=part)


def open_clips_for(fitted: FittedWorldModel, stores: Sequence[Path], part: Part) -> ClipSampler:
    """As ``fitted`` predicts them. WorldModelError where another robot was recorded."""
    clips = open_clips(stores, fitted.info.dynamics, part, cameras=fitted.info.robot.cameras)
    robot = recorded_robot(stores[0], cameras=clips.cameras, where=EVERYTHING)
    check_robot(fitted.info, robot, what="the recorded robot")
    return clips


def outcomes_digest(clips: Iterable[ClipSampler]) -> str:
    """sha256 of which episodes they hold, and of their outcomes."""
    return hashlib.sha256("".join(part.outcomes() for part in clips).encode()).hexdigest()


def recorded_limits(entries: Iterable[Entry]) -> dict[str, int]:
    """Control steps of the longest recorded episode of each task, by task, in the order of their first episodes."""
    limits: dict[str, int] = {}
    for entry in entries:
        limits[entry.task] = max(entry.steps, limits.get(entry.task, 0))
    return limits


def time_limits(spec: EnvSpec | None, fitted: FittedWorldModel, stores: Sequence[Path]) -> dict[str, int]:
    """By task, of the environment; without one of all recorded episodes of ``stores``, held-out ones or not."""
    return recorded_limits(open_clips_for(fitted, stores, "all").entries) if spec is None else spec.limits


def check_simulator(info: WorldModelInfo, clips: ClipSampler, spec: EnvSpec) -> None:
    """UserError where the simulator has another robot or lacks a task of ``clips``."""
    check_robot(info, RobotSpec.of(spec), what="the simulator")
    check_tasks(clips.entries, spec)


def check_reward_every(info: WorldModelInfo, config: WorldModelConfig) -> None:
    """WorldModelError where the thresholds of success were set for another interval between classifications."""
    configured = config.imagined_env.reward_every
    if info.reward_every != configured:
        raise WorldModelError(
            f"imagined_env.reward_every is {configured}, and the world model's thresholds were set with "
            f"{info.reward_every}: set it to {info.reward_every}, or fit a world model in another folder (--out)"
        )


def no_action_path(directory: Path, steps: int) -> Path:
    """Of the baseline that was fitted in ``steps`` without the actions."""
    return directory / f"no_action_{steps}.safetensors"


# -- fit ------------------------------------------------------------------------------------------------------------


def fit_world_model(
    config: WorldModelConfig,
    stores: Sequence[Path],
    directory: Path,
    *,
    seed: int,
    cameras: Sequence[str] | None = None,
    policy: object = None,
    start: Path | None = None,
    device: Device = CPU,
) -> dict[str, Any]:
    """Fit dynamics, then the reward model, into ``directory``; what is finished there is not repeated.

    WorldModelError where ``directory`` holds a fit with other settings, episodes, seed, ``start`` or encoder, and,
    before anything is fitted, where the episodes hold too few successes for a reward model or few observations a whole
    chunk apart (``ClipSampler.check_full_gaps``), where ``policy`` lacks the encoder that the reward model is to
    keep, or where its encoder is taken and it is of another robot.

    ``cameras``: to predict, in this order; None: those of the policy whose encoder is taken, else all that were
    recorded. ``policy``: the reward model starts from its encoder, if it has one of the same settings. ``start``: an
    earlier world model whose dynamics are fitted further.
    """
    try:
        taken = taken_digest(policy, config.reward_model)
    except ValueError as error:
        raise WorldModelError(f"imagination.model.reward_model: {error}") from None
    seen = policy.spec.robot if isinstance(policy, Policy) and taken is not None else None
    clips = open_clips(stores, config.dynamics, "fit", cameras=seen.cameras if seen and cameras is None else cameras)
    calibration = open_clips(stores, config.dynamics, "calibration", cameras=clips.cameras)
    robot = recorded_robot(stores[0], cameras=clips.cameras, where=EVERYTHING)
    if seen is not None and (differences := seen.differences(robot)):
        raise WorldModelError(
            f"the policy whose encoder the reward model takes does not fit the recorded robot: {differences}; give a "
            "policy of this robot"
        )
    success_observations(clips, config.reward_model)
    clips.check_full_gaps()
    earlier = load_world_model(start, device) if start is not None else None
    path = directory / WORLD_MODEL_FILE
    with _fit_folder(directory, config, [clips, calibration], seed=seed, start=earlier, taken=taken):
        if not path.exists():
            dynamics = fit_dynamics(
                config, clips, robot, directory / "dynamics", seed=seed, start=earlier, device=device
            )
            reward_model, metrics = fit_reward_model(
                config, dynamics, clips, calibration, directory / "reward_model", seed=seed, policy=policy
            )
            reference, every = reference_error(dynamics, calibration, seed=seed), config.imagined_env.reward_every
            save_world_model(
                dynamics, reward_model, path, reference_error=reference, metrics=metrics, reward_every=every
            )
        if config.no_action_steps:
            _fit_baseline(config, clips, robot, directory, seed=seed, device=device)
    return {"world": str(path), **load_world_model(path).info.metrics}


def _fit_baseline(
    config: WorldModelConfig, clips: ClipSampler, robot: RobotSpec, directory: Path, *, seed: int, device: Device
) -> None:
    """Fit dynamics that are not given the actions, unless it is done, in the latents of the world model; saved with its
    reward model, because a world model file holds one.
    """
    path = no_action_path(directory, config.no_action_steps)
    if path.exists():
        return
    blind, fit = replace(config.dynamics, actions=False), replace(config.fit, steps=config.no_action_steps)
    fitted, every = load_world_model(directory / WORLD_MODEL_FILE), config.imagined_env.reward_every
    codec = fitted.dynamics.codec
    dynamics = fit_dynamics(
        replace(config, dynamics=blind, fit=fit, distill=None),
        clips,
        robot,
        path.with_suffix(""),
        seed=seed,
        start=None,
        device=device,
        autoencoder=codec if isinstance(codec, Autoencoder) else None,
    )
    save_world_model(dynamics, fitted.reward_model, path, reference_error=1.0, metrics={}, reward_every=every)


def _fit_folder(
    directory: Path,
    config: WorldModelConfig,
    clips: Sequence[ClipSampler],
    *,
    seed: int,
    start: FittedWorldModel | None,
    taken: str | None,
) -> AbstractContextManager[None]:
    """With what its models depend on; ``taken``: of a policy. WorldModelError where that differs."""
    settings = {name: value for name, value in flat_settings(config).items() if not name.startswith(USE_SETTINGS)}
    settings["imagined_env.reward_every"] = config.imagined_env.reward_every  # thresholds are set with it
    fitted_to = {
        "settings": settings,
        "seed": seed,
        "episodes": outcomes_digest(clips),
        "start": start and start.sha256,
        "policy": taken,
    }
    otherwise = WorldModelError(
        f"{directory} holds a world model, or a part of its fit, with other settings, episodes or another seed, "
        "or with the encoder of another policy; choose another folder (--out), or delete this one"
    )
    return fit_folder(directory, fitted_to, otherwise=otherwise, beside=(EPISODES, CLONE))


def fit_dynamics(
    config: WorldModelConfig,
    clips: ClipSampler,
    robot: RobotSpec,
    directory: Path,
    *,
    seed: int,
    start: FittedWorldModel | None,
    device: Device,
    autoencoder: Autoencoder | None = None,
) -> FlowWorldModel:
    """The dynamics after ``config.fit.steps``, distilled if asked for; resumed from checkpoints in ``directory``.

    ``autoencoder``: whose weights it takes, without ``start``; None: it is fitted, in a latent model.
    """
    torch.manual_seed(seed)
    dynamics = device.place(build_world_model(config.dynamics, robot))
    if start is None:
        with crossing("scales"):
            dynamics.fit_scales(*(part.to(dynamics.device) for part in clips.statistics()))
        if autoencoder is None:
            fit_autoencoder(config, dynamics, clips, directory.parent / "autoencoder", seed=seed)
        else:
            assert isinstance(dynamics.codec, Autoencoder)  # as that of the same settings
            with crossing("weights"):
                dynamics.codec.load_state_dict(autoencoder.state_dict())
    else:
        check_robot(start.info, robot, what="the recorded robot")
        dynamics.load_state_dict(start.dynamics.state_dict())
    kinematics = KinematicsFit(dynamics, clips, seed=seed, steps=config.kinematics_steps)
    run_fit(kinematics, directory / "kinematics", title="kinematics", shown="loss")
    dynamics.kinematics.requires_grad_(False)
    fit = DynamicsFit(dynamics, config.fit, clips, seed=seed)
    run_fit(fit, directory, title="world model", shown="frame")
    if config.distill is not None:
        distillation = Distillation(dynamics, config.distill, clips, seed=seed)
        run_fit(distillation, directory / "distilled", title="distillation", shown="frame")
    return dynamics.eval()


def fit_autoencoder(
    config: WorldModelConfig, dynamics: FlowWorldModel, clips: ClipSampler, directory: Path, *, seed: int
) -> None:
    """Fit the autoencoder of a latent model unless it was loaded, then set its scales."""
    codec = dynamics.codec
    if not isinstance(codec, Autoencoder):
        return
    if codec.untrained:
        fit = AutoencoderFit(codec, config.autoencoder_fit, clips, seed=seed)
        run_fit(fit, directory, title="autoencoder", shown="reconstruction")
    with crossing("scales"):
        codec.fit_scales(clips.draw(np.random.default_rng(seed), 256, 1).frames.flatten(0, 2).to(dynamics.device))


def fit_reward_model(
    config: WorldModelConfig,
    dynamics: FlowWorldModel,
    clips: ClipSampler,
    calibration: ClipSampler,
    directory: Path,
    *,
    seed: int,
    policy: object,
) -> tuple[RewardModel, dict[str, float]]:
    """The reward model with its thresholds set, and its metrics on predicted observations of ``calibration``."""
    settings = config.reward_model
    imagined = imagine_observations(dynamics, clips, settings, count=settings.imagined_clips, seed=seed)
    count = max(2, settings.imagined_clips // 4)
    check = imagine_observations(dynamics, calibration, settings, count=count, seed=spawn_seed(seed, "check"))
    torch.manual_seed(seed)
    with crossing("weights"):
        reward_model = RewardModel(settings, dynamics.robot).to(dynamics.device)
    reward_model.normalizer.load_state_dict(dynamics.normalizer.state_dict())
    reward_model.start_from(policy)
    fit = RewardModelFit(reward_model, clips, imagined, seed=seed)
    run_fit(fit, directory, title="reward model", shown="loss")
    metrics = set_failed_threshold(reward_model, check)
    every = config.imagined_env.reward_every
    return reward_model, metrics | set_thresholds(dynamics, reward_model, calibration, seed=seed, reward_every=every)


@torch.no_grad()
def reference_error(dynamics: FlowWorldModel, calibration: ClipSampler, *, seed: int) -> float:
    """The quantile REFERENCE_QUANTILE of the model's own error estimate over first predictions."""
    with crossing("scales"):
        clip = calibration.draw(np.random.default_rng(seed), 256, 1).to(dynamics.device)
    noise = dynamics.noise(256, make_generator(dynamics.device, seed))
    prefill = dynamics.prefill(first_history(dynamics, clip))
    imagined = dynamics.sample_chunk(prefill, clip.action[:, 0], clip.length[:, 0], noise)
    with crossing("scales"):
        return float(torch.quantile(imagined.error, REFERENCE_QUANTILE))


# -- use ------------------------------------------------------------------------------------------------------------


def make_imagined_env(
    config: WorldModelConfig, fitted: FittedWorldModel, starts: ImaginedStarts, *, limits: Mapping[str, int]
) -> ImaginedEnv:
    """Imagined episodes of the tasks of ``starts``. ``limits``: control steps of each task's longest episode."""
    check_reward_every(fitted.info, config)
    return ImaginedEnv(
        config.imagined_env,
        fitted.dynamics,
        fitted.reward_model,
        starts,
        limits=[limits[task] for task in starts.tasks],
        reference_error=fitted.info.reference_error,
        fingerprint=fitted.sha256[:16],
    )


def evaluate_world_model(
    config: WorldModelConfig,
    directory: Path,
    stores: Sequence[Path],
    *,
    sim: EnvConfig,
    env: VectorEnv | None,
    seed: int,
    device: Device = CPU,
) -> dict[str, Any]:
    """The evaluation of the world model in ``directory`` on held-out episodes of ``stores``; writes videos there.

    ``control_steps``: of both in ``env``.
    """
    fitted, steps = load_world_model(directory / WORLD_MODEL_FILE, device), config.no_action_steps
    no_action = load_world_model(no_action_path(directory, steps), device).dynamics if steps else None
    clips, every = open_clips_for(fitted, stores, "held_out"), config.imagined_env.reward_every
    check_reward_every(fitted.info, config)
    if env is not None:
        check_simulator(fitted.info, clips, env.spec)
    evaluation = WorldModelEvaluation(reward_model=fitted.reward_model, clips=clips, reward_every=every, seed=seed)
    divergence = make_divergence(fitted, stores, sim=sim, seed=seed)
    report = evaluation.report(fitted.dynamics, env=env, no_action=no_action, locate=divergence.locate)
    compared = write_evaluation_videos(
        fitted, clips, directory / "videos", env=env, divergence=divergence, reward_every=every, seed=seed
    )
    return report | {
        "control_steps": report["control_steps"] + sum(one.control_steps for one in compared),
        "videos": [str(one.video) for one in compared],
        "reference_image_difference": divergence.reference_image_difference,
        "divergence": {one.video.stem: {"step": one.divergence_step, "reason": one.reason} for one in compared},
    }


def make_divergence(fitted: FittedWorldModel, stores: Sequence[Path], *, sim: EnvConfig, seed: int) -> Divergence:
    """The reference is measured on the calibration episodes of ``stores``."""
    reference = reference_image_difference(fitted.dynamics, open_clips_for(fitted, stores, "calibration"), seed=seed)
    return Divergence(reference_image_difference=reference, locate=object_locator(sim, fitted.info.robot.cameras))
