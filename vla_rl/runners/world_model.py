"""Fit a world model to recorded episodes, and say how far it can be believed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import Field

from episodes.store import EpisodeStore
from policies.policy import Policy, RobotSpec
from sims.registry import SimulatorConfig, object_locator
from sims.vector_env import VectorEnv
from vla_rl.algorithms.bc import BCConfig
from vla_rl.intervals import wilson_interval
from vla_rl.runners.world_model_videos import film_trust
from vla_rl.runs.checkpoint import latest_checkpoint, load_tree, save_checkpoint
from vla_rl.runs.metrics import Metrics
from vla_rl.runs.progress import progress
from world_models.bundle import FittedWorld, check_robot, load_world, save_world
from world_models.data.clips import ClipSampler, Part
from world_models.data.keyframes import KeyframeConfig, Keyframes
from world_models.fidelity import set_thresholds, trust_report
from world_models.imagined_env import ImaginedConfig, ImaginedEnv
from world_models.models.autoencoder import Autoencoder, AutoencoderFitter
from world_models.models.conv_flow import ConvFlowConfig
from world_models.models.flow_model import FlowWorld
from world_models.registry import WorldConfig, build_world
from world_models.reward_model import OutcomeConfig, OutcomeFitter, OutcomeModel, calibrate, imagine_looks
from world_models.training.distill import DistillConfig, Distiller
from world_models.training.fit import FitConfig, Fitter, first_moment, fit_kinematics
from world_models.training.optimization import Optimization
from world_models.world_model import WorldModelError

WORLD_FILE, NO_ACTION_FILE = "world.safetensors", "no_action.safetensors"
USUAL = 0.9  # quantile of the model's own error estimate that counts as usual


@dataclass(frozen=True, kw_only=True)
class WorldModelConfig:
    """``distill``: after the fit, into fewer denoising steps. ``device``: where the dynamics are fitted and imagined.
    ``no_action_steps``: fit steps of the baseline that ignores actions, for the trust report (0: none).
    """

    world: Annotated[WorldConfig, Field(discriminator="name")] = field(default_factory=ConvFlowConfig)
    fit: FitConfig = field(default_factory=FitConfig)
    distill: DistillConfig | None = None
    device: str = "cpu"
    outcome: OutcomeConfig = field(default_factory=OutcomeConfig)
    keyframes: KeyframeConfig = field(default_factory=KeyframeConfig)
    imagined: ImaginedConfig = field(default_factory=ImaginedConfig)
    no_action_steps: int = 0

    def __post_init__(self) -> None:
        if self.distill is not None:
            self.distill.stride(self.world.steps)


@dataclass(frozen=True, kw_only=True)
class TrustConfig:
    """What the trust report must reach; below, branches are halved. ``useless_auc``: below it the run stops."""

    min_success_auc: float = 0.8
    max_hallucinated: float = 0.2
    max_delta_success: float = 0.2
    useless_auc: float = 0.6


@dataclass(frozen=True, kw_only=True)
class ImaginationConfig:
    """``real_episodes``: recorded with the exploring policy at the beginning of each round, a look every
    ``observe_every`` control steps. ``demonstrations``: the run's own are fitted too. All of them succeed, so where they
    are many beside the policy's episodes the model expects success. ``perturbed_chunks``: share of the recorded chunks
    whose actions are pushed aside, each dimension by ``perturbation`` (std, of the action range's half).
    ``self_imitation``: after each recording the policy is cloned further from all successes there are, its own among
    them (null: it is not). ``stores``: episodes that exist already.
    """

    rounds: int = 2
    real_episodes: int = 200
    observe_every: int = 4
    demonstrations: bool = True
    perturbed_chunks: float = 0.0
    perturbation: float = 0.05
    self_imitation: BCConfig | None = None
    stores: tuple[str, ...] = ()
    model: WorldModelConfig = field(default_factory=WorldModelConfig)
    trust: TrustConfig = field(default_factory=TrustConfig)

    def __post_init__(self) -> None:
        for name in ("rounds", "real_episodes", "observe_every"):
            if getattr(self, name) < 1:
                raise ValueError(f"imagination.{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.perturbed_chunks <= 1:
            raise ValueError(f"imagination.perturbed_chunks must be within [0, 1], got {self.perturbed_chunks}")


def open_clips(stores: Sequence[Path], config: WorldModelConfig, part: Part) -> ClipSampler:
    return ClipSampler([EpisodeStore(path) for path in stores], action_horizon=config.world.action_horizon, part=part)


def robot_of(stores: Sequence[Path], clips: ClipSampler) -> RobotSpec:
    """What the recorded robot is."""
    store = EpisodeStore(stores[0])
    entries = store.select()
    if not entries:
        raise WorldModelError(f"{store.path} holds no episodes; record some with: vla-rl collect")
    return RobotSpec(
        action_dim=clips.action_dim,
        state_dim=clips.state_dim,
        cameras=clips.cameras,
        image_size=clips.image_size,
        control_hz=store.read(entries[0].id).control_hz,
    )


def fit_world(
    config: WorldModelConfig,
    stores: Sequence[Path],
    directory: Path,
    *,
    seed: int,
    policy: Policy | None = None,
    start: Path | None = None,
) -> dict[str, Any]:
    """Dynamics, then outcomes, into ``directory``; what is done is not repeated, dynamics resume where they stopped.

    ``policy``: its encoder is where the outcome model starts. ``start``: an earlier world model to go on from.
    """
    clips, calibration = open_clips(stores, config, "fit"), open_clips(stores, config, "calibration")
    robot = robot_of(stores, clips)
    earlier = load_world(start) if start is not None else None
    if not (directory / WORLD_FILE).exists():
        world = fit_dynamics(config, config.world, clips, robot, directory / "dynamics", seed=seed, start=earlier)
        outcome, metrics = fit_outcome(config, world, clips, calibration, directory, seed=seed, policy=policy)
        usual = usual_error(world, calibration, seed=seed)
        save_world(world, outcome, directory / WORLD_FILE, usual_error=usual, metrics=metrics)
    if config.no_action_steps and not (directory / NO_ACTION_FILE).exists():
        blind, short = _no_action(config)
        world = fit_dynamics(short, blind, clips, robot, directory / "no_action", seed=seed, start=None)
        outcome = load_world(directory / WORLD_FILE).outcome
        save_world(world, outcome, directory / NO_ACTION_FILE, usual_error=1.0, metrics={})
    return {"world": str(directory / WORLD_FILE), **load_world(directory / WORLD_FILE).info.metrics}


def _no_action(config: WorldModelConfig) -> tuple[WorldConfig, WorldModelConfig]:
    short = replace(config.fit, steps=config.no_action_steps)
    return replace(config.world, actions=False), replace(config, fit=short, distill=None)


def fit_dynamics(
    config: WorldModelConfig,
    world_config: WorldConfig,
    clips: ClipSampler,
    robot: RobotSpec,
    directory: Path,
    *,
    seed: int,
    start: FittedWorld | None,
) -> FlowWorld:
    """The dynamics after ``config.fit.steps``, distilled if asked; checkpoints in ``directory`` make it resumable."""
    torch.manual_seed(seed)
    world = build_world(world_config, robot).to(config.device)
    if start is None:
        world.fit_scales(*(part.to(config.device) for part in clips.statistics()))
        fit_autoencoder(world, clips, directory.parent / "autoencoder", seed=seed)
    else:
        check_robot(start.info, robot, what="the recorded robot")
        world.load_state_dict(start.world.state_dict())
    fit_kinematics(world, clips, seed=seed)
    run_fit(Fitter(world, config.fit, clips, seed=seed), directory, "world model", "frame")
    if config.distill is not None:
        run_fit(Distiller(world, config.distill, clips, seed=seed), directory / "distilled", "distillation", "frame")
    return world.eval()


def fit_autoencoder(world: FlowWorld, clips: ClipSampler, directory: Path, *, seed: int) -> None:
    """Train the autoencoder of a latent world unless it was loaded, then set its scales; the baseline shares it."""
    codec = world.codec
    if not isinstance(codec, Autoencoder):
        return
    if codec.untrained:
        run_fit(AutoencoderFitter(codec, clips, seed=seed), directory, "autoencoder", "reconstruction")
    codec.measure(clips.draw(np.random.default_rng(seed), 256, 1).frames.flatten(0, 2))


def run_fit(fitter: Optimization, directory: Path, title: str, shown: str) -> None:
    """To the fitter's end, from the latest checkpoint in ``directory`` on; ``shown``: the metric beside the bar."""
    if (latest := latest_checkpoint(directory)) is not None:
        fitter.load_state_dict(load_tree(latest))
    directory.mkdir(parents=True, exist_ok=True)
    with (
        Metrics(directory, next_iteration=fitter.step, tensorboard=False) as record,
        progress(title, fitter.steps, done=fitter.step) as advance,
    ):
        while fitter.step < fitter.steps:
            metrics = fitter.update()
            advance(note=f"{shown} {metrics[shown]:.4f}")
            if fitter.step % 20 == 0:
                record.write(fitter.step, metrics)
            if fitter.step % 200 == 0 or fitter.step == fitter.steps:
                save_checkpoint(directory, fitter.step, fitter.state_dict(), keep=1)


def fit_outcome(
    config: WorldModelConfig,
    world: FlowWorld,
    clips: ClipSampler,
    calibration: ClipSampler,
    directory: Path,
    *,
    seed: int,
    policy: Policy | None,
) -> tuple[OutcomeModel, dict[str, float]]:
    """The calibrated outcome model, and what it reaches on imagined looks of ``calibration``."""
    settings = config.outcome
    imagined = imagine_looks(world, clips, settings, count=settings.imagined_clips, seed=seed)
    check = imagine_looks(world, calibration, settings, count=max(2, settings.imagined_clips // 4), seed=seed + 1)
    torch.manual_seed(seed)
    outcome = OutcomeModel(settings, world.robot)
    outcome.normalizer.load_state_dict(world.normalizer.state_dict())
    if policy is not None:
        outcome.start_from(policy.vla, policy.normalizer)
    fitter = OutcomeFitter(outcome, clips, imagined, seed=seed)
    outcome.train()
    with (
        Metrics(directory, next_iteration=0, tensorboard=False) as record,
        progress("outcomes", settings.steps) as advance,
    ):
        while fitter.step < settings.steps:
            metrics = fitter.update()
            advance(note=f"loss {metrics['outcome_loss']:.3f}")
            if fitter.step % 20 == 0:
                record.write(fitter.step, metrics)
    calibrated = calibrate(outcome, check)
    return outcome, calibrated | set_thresholds(
        world, outcome, calibration, seed=seed, every=config.imagined.verdict_every
    )


@torch.no_grad()
def usual_error(world: FlowWorld, calibration: ClipSampler, *, seed: int) -> float:
    """The model's own error estimate that a share USUAL of first predictions stays below."""
    clip = calibration.draw(np.random.default_rng(seed), 256, 1)
    noise = world.noise(256, torch.Generator().manual_seed(seed))
    imagined = world.sample_chunk(world.prefill(first_moment(world, clip)), clip.action[:, 0], clip.length[:, 0], noise)
    return float(torch.quantile(imagined.error, USUAL))


def imagined_env(
    config: WorldModelConfig, fitted: FittedWorld, clips: ClipSampler, *, tasks: tuple[str, ...], max_steps: int
) -> ImaginedEnv:
    """Imagined episodes of these tasks, from keyframes of ``clips``."""
    return ImaginedEnv(
        config.imagined,
        fitted.world.to(config.device),
        fitted.outcome,
        Keyframes(clips, config.keyframes, tasks=tasks),
        limits=[max_steps] * len(tasks),
        usual_error=fitted.info.usual_error,
        fingerprint=fitted.sha256[:16],
    )


def report_trust(
    config: WorldModelConfig,
    directory: Path,
    stores: Sequence[Path],
    *,
    sim: SimulatorConfig,
    env: VectorEnv | None,
    seed: int,
) -> dict[str, Any]:
    """The trust report of the world model in ``directory`` on held-out episodes of ``stores``; films beside it."""
    fitted, blind = load_world(directory / WORLD_FILE), directory / NO_ACTION_FILE
    fitted.world.to(config.device)
    clips, every = open_clips(stores, config, "held_out"), config.imagined.verdict_every
    report = trust_report(
        fitted.world,
        fitted.outcome,
        clips,
        env=env,
        no_action=load_world(blind).world if blind.exists() else None,
        locate=object_locator(sim, fitted.info.robot.cameras),
        every=every,
        seed=seed,
    )
    hallucinated, scripts = report["hallucinated_success"], report["swapped_scripts"]
    if hallucinated is not None:
        report["hallucinated_success_interval"] = wilson_interval(round(hallucinated * scripts), scripts)
    films = film_trust(fitted, clips, directory / "films", env=env, every=every, seed=seed)
    return report | {"films": [str(film) for film in films]}
