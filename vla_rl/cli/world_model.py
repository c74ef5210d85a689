"""``vla-rl world-model fit | evaluate | imagine | drive CONFIG``"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from tyro.conf import Positional, arg

from sims.errors import UserError
from sims.numbers.ranges import Count, Interval, PositiveInt, Seed
from vla_rl.cli.arguments import Json, load_corrections, load_experiment
from vla_rl.cli.result import Result

if TYPE_CHECKING:
    from vla_rl.config.experiment import Experiment
    from vla_rl.config.imagination import ImaginationConfig


Opened = tuple["Experiment", "ImaginationConfig", tuple[Path, ...]]


@dataclass(frozen=True)
class WorldModelCommand:
    """What every verb takes."""

    config: Annotated[Positional[Path], arg(metavar="CONFIG")]
    """a YAML file with a section 'imagination', or the name of a packaged one such as imagined_reach"""
    episodes: tuple[Path, ...] = ()
    """episode stores (default: imagination.stores of CONFIG, or start.store where it names no simulator)"""
    out: Path | None = None
    """folder of the world model (default: runs/<name of CONFIG>-world)"""
    seed: Seed | None = None
    """determines all noise (default: seed of CONFIG)"""
    overrides: tyro.conf.Suppress[tuple[str, ...]] = ()

    def opened(self) -> Opened:
        """(experiment, its settings of imagination, episode stores)"""
        from vla_rl.runners.logs import given_stores

        experiment = load_experiment(self.config, self.overrides)
        if self.seed is not None:
            experiment = replace(experiment, seed=self.seed)
        settings = experiment.imagination
        if settings is None:
            raise UserError(f"{self.config} has no section 'imagination'; such as the packaged imagined_reach")
        stores = self.episodes or given_stores(experiment, settings)
        if not stores:
            raise UserError(
                "no episodes: give stores with --episodes, or as imagination.stores, or as start.store where sim.name "
                "is none"
            )
        return experiment, settings, stores

    def folder(self) -> Path:
        return self.out or Path("runs") / f"{self.config.stem}-world"


@dataclass(frozen=True)
class Fit(WorldModelCommand):
    """Fit a world model to recorded episodes; --section.key VALUE changes any setting of CONFIG."""

    policy: Path | None = None
    """a bundle, whose encoder the reward model starts from if its settings are those of the reward model's; the world
    model then has its cameras"""
    json: Json = False

    def run(self) -> Result:
        from policies.bundle import load_bundle
        from vla_rl.runners.world_model import fit_world_model
        from vla_rl.runs.run_dir import experiment_device

        experiment, settings, stores = self.opened()
        device = experiment_device(experiment)
        policy = None if self.policy is None else load_bundle(self.policy, device=device)
        fitted = fit_world_model(
            settings.model, stores, self.folder(), seed=experiment.seed, policy=policy, device=device
        )
        return Result(fitted)


@dataclass(frozen=True)
class Evaluate(WorldModelCommand):
    """Accuracy of a world model on held-out episodes; --section.key VALUE changes any setting of CONFIG."""

    bundles: tuple[Path, ...] = ()
    """also the imagined success of these policies, compared with the real one where sim is a simulator"""
    starts: PositiveInt = 64
    """held-out starts for each of those policies"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.config.environments import make_env
        from vla_rl.runners.imagined_success import compare_success
        from vla_rl.runners.world_model import evaluate_world_model
        from vla_rl.runs.run_dir import experiment_device

        experiment, settings, stores = self.opened()
        device = experiment_device(experiment)
        env = None if experiment.without_simulator else make_env(experiment.sim)
        try:
            report = evaluate_world_model(
                settings.model, self.folder(), stores, sim=experiment.sim, env=env, seed=experiment.seed, device=device
            )
            if self.bundles:
                compared = compare_success(
                    settings.model,
                    self.folder(),
                    stores,
                    env=env,
                    bundles=self.bundles,
                    count=self.starts,
                    seed=experiment.seed,
                    device=device,
                )
                report |= compared if env is not None else {"policies": compared["policies"]}
        finally:
            if env is not None:
                env.close()
        return Result(report)


@dataclass(frozen=True)
class Imagine(WorldModelCommand):
    """Write a video of an imagined episode; --section.key VALUE changes any setting of CONFIG."""

    episode: Count = 0
    """number of the held-out episode to start from"""
    keys: str = ""
    """actions instead of the recorded ones: a moves action dimension 0 up, A down, b and B dimension 1, ..."""
    held: tuple[Count, ...] = ()
    """with --keys: action dimensions that keep the value of their last key, such as a gripper command"""
    json: Json = False

    def run(self) -> Result:
        from vla_rl.runners.world_model import WORLD_MODEL_FILE, make_divergence, open_clips_for
        from vla_rl.runners.world_model_videos import recorded_chunks, write_keyed_rollout, write_prediction
        from vla_rl.runs.run_dir import experiment_device
        from world_models.bundle import load_world_model

        if self.held and not self.keys:
            raise UserError("--held goes with --keys")
        experiment, _, stores = self.opened()
        fitted = load_world_model(self.folder() / WORLD_MODEL_FILE, experiment_device(experiment))
        clips = open_clips_for(fitted, stores, "held_out")
        if not 0 <= self.episode < len(clips.entries):
            raise UserError(f"--episode must be within 0..{len(clips.entries) - 1}, got {self.episode}")
        path = self.folder() / f"imagined_{self.episode}{'_keys' if self.keys else ''}.mp4"
        instruction = clips.entries[self.episode].instruction
        if self.keys:
            write_keyed_rollout(fitted, clips, self.episode, self.keys, path, held=self.held)
            return Result({"video": str(path), "instruction": instruction})
        truth = recorded_chunks(clips, self.episode, fitted.dynamics.action_horizon)
        divergence = make_divergence(fitted, stores, sim=experiment.sim, seed=experiment.seed)
        compared = write_prediction(
            fitted, clips, self.episode, truth, path, caption=instruction, divergence=divergence
        )
        return Result({"video": str(path), "instruction": instruction, "divergence_step": compared.divergence_step})


@dataclass(frozen=True)
class Drive(WorldModelCommand):
    """A page on which the keyboard moves the imagined robot and, where CONFIG names a simulator, the true one beside
    it; until Ctrl-C. Prints an address with a token that works once."""

    episode: Count = 0
    """number of the held-out episode to start from; beside a simulator, among those that begin with their recording"""
    control: Annotated[Path, arg(metavar="CONFIG")] = Path("hg_dagger")
    """how a person drives, as for `vla-rl correct --config`: a YAML file, or the name of a packaged one"""
    port: Annotated[int, Interval(ge=0, le=65535)] = 0
    """of the page, on loopback; 0: any that is free"""
    no_browser: bool = False
    """only print the address"""

    def run(self) -> None:
        from real_robot.corrections.web import Address
        from vla_rl.drive.server import drive

        experiment, _, stores = self.opened()
        drive(
            experiment,
            self.folder(),
            stores,
            load_corrections(self.control).control,
            episode=self.episode,
            address=Address(port=self.port),
            browser=not self.no_browser,
        )
