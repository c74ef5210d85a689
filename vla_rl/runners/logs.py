"""From recorded episodes to an improved policy, with no simulator: ``vla-rl train`` where ``sim.name`` is none.

Fit a world model to the episodes -> evaluate it on those that were held out -> train in imagined episodes -> imagined
success of the policy before and after, from held-out starts. Whether the world model is right is all that can be said
without a simulator or a robot, so its evaluation stands beside every figure, and training is left out where it fails.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from policies.bundle import load_bundle
from policies.device import CPU
from sims.errors import UserError
from sims.vector_env import EnvSpec
from vla_rl.config.experiment import Experiment
from vla_rl.config.imagination import ImaginationConfig
from vla_rl.runners.evaluate import evaluate_policy
from vla_rl.runners.imagination import Reinforce, Rounds, missed, not_measured, refusal, ship
from vla_rl.runners.imagined_success import whole_episodes
from vla_rl.runners.imitation import recorded_robot
from vla_rl.runners.world_model import WORLD_MODEL_FILE, open_clips, open_clips_for, recorded_limits
from vla_rl.runs.progress import console
from vla_rl.runs.run_dir import COMMAND_FILE, Run, evaluation_seconds, stage_seconds
from world_models.bundle import load_world_model
from world_models.data.clip import Part
from world_models.data.keyframes import Keyframes
from world_models.evaluation.action_sequences import startable

OF_RECORDING = (
    "rounds",
    "imagine_every",
    "real_episodes",
    "observe_every",
    "perturbed_chunks",
    "perturbation",
    "clone_successes",
)
FIGURES = (
    "success_auc",
    "success_auc_interval",
    "length_matched_auc",
    "length_matched_auc_interval",
    "length_matched_pairs",
    "recorded_auc",
    "recorded_auc_interval",
    "frozen_picture_auc",
    "hallucinated_success",
    "hallucinated_success_interval",
    "frozen_picture_hallucinated_success",
    "no_action_hallucinated_success",
    "imagined_success",
    "true_success",
    "delta_success",
    "psnr",
    "copy_psnr",
    "episodes",
)


def log_settings(experiment: Experiment) -> ImaginationConfig:
    """The section imagination, with start.store for its stores where it names none. UserError without any."""
    settings = experiment.imagination
    if settings is None:
        raise UserError(
            "sim.name is none, and this needs a simulator: name one in section sim, or add a section imagination, "
            "in whose world model a policy is trained (docs/world-models.md)"
        )
    stores = given_stores(experiment, settings)
    if not stores:
        raise UserError("sim.name is none: give recorded episodes as start.store or imagination.stores")
    return replace(settings, stores=stores)


def given_stores(experiment: Experiment, settings: ImaginationConfig) -> tuple[Path, ...]:
    """What a world model is fitted to before a run records anything: ``settings.stores``, and where these are none and
    there is no simulator, start.store. Empty without any."""
    store = experiment.start.store
    return settings.stores or ((store,) if store is not None and experiment.without_simulator else ())


def recorded_spec(experiment: Experiment) -> EnvSpec:
    """What the episodes tell of the environment that they were recorded in. UserError where they do not suffice."""
    settings = log_settings(experiment)
    if unused := [name for name in OF_RECORDING if getattr(settings, name) != getattr(ImaginationConfig(), name)]:
        console.print(f"sim.name is none; these settings of imagination have no effect: {', '.join(unused)}")
    robot, model = recorded_robot(settings.stores[0]), settings.model
    parts: tuple[Part, ...] = get_args(Part)
    clips = {part: open_clips(settings.stores, model.dynamics, part, cameras=robot.cameras) for part in parts}
    limits = recorded_limits(clips["all"].entries)
    tasks = tuple(limits)
    Keyframes(clips["fit"], model.keyframes, tasks=tasks)
    clips["fit"].check_full_gaps()
    return EnvSpec(
        name="recorded episodes",
        num_envs=model.imagined_env.num_envs,
        action_dim=robot.action_dim,
        state_dim=robot.state_dim,
        cameras=robot.cameras,
        image_size=robot.image_size,
        control_hz=robot.control_hz,
        max_steps=max(limits.values()),
        action_delay=robot.action_delay,
        tasks=tasks,
        device=CPU.device,
        fingerprint={},
        can_capture=False,
        task_limits=tuple(limits.values()),
    )


def improve_from_logs(run: Run, spec: EnvSpec, start: Path, *, reinforce: Reinforce) -> dict[str, Any]:
    """Leaves the trained policy in ``run.bundle``, or the one in ``start`` where the world model misleads."""
    settings = log_settings(run.experiment)
    rounds = Rounds(run, spec, settings, env=None)
    rounds.fit(0, start)
    report = rounds.evaluate(0)
    why = refusal(report, settings.thresholds, run.experiment.algorithm)
    refused = why is not None
    if refused:
        console.print(f"nothing is trained in the world model: {why}")
    ship(start if refused else rounds.imagine(0, report, start, reinforce), run.bundle)
    return {"iterations": 0 if refused else run.experiment.algorithm.iterations, "refused": refused}


def evaluate_imagined(run: Run, spec: EnvSpec, start: Path) -> None:
    """Success of the deployed policies, before and after, from held-out starts to the end of the task."""
    settings, evaluation = log_settings(run.experiment), run.experiment.evaluation
    for name, bundle in (("before", start), ("after", run.bundle)):
        with run.stage(f"imagined_{name}") as stage:
            if not stage.pending:
                continue
            rounds = Rounds(run, spec, settings, env=None)
            rounds.check_episodes(0, "held_out")
            fitted = load_world_model(rounds.folder(0) / WORLD_MODEL_FILE, run.device)
            clips = open_clips_for(fitted, settings.stores, "held_out")
            env, starts = whole_episodes(
                settings.model,
                fitted,
                clips,
                startable(clips, None),
                limits=spec.limits,
                count=evaluation.episodes,
            )
            policy, seed = load_bundle(bundle, device=run.device), run.experiment.evaluation_seed
            stage.result = evaluate_policy(policy, env, starts, seed=seed, stochastic=False)


def log_result(run: Run) -> dict[str, Any]:
    """What result.json holds: nothing in it was seen in a simulator or on a robot."""
    stages, settings = run.stages(), log_settings(run.experiment)
    report = stages["evaluate_model_0"]
    return {
        "imagined": {name: stages[f"imagined_{name}"] for name in ("before", "after")},
        "world_model": {name: report[name] for name in FIGURES if name in report},
        "missed": missed(report, settings.thresholds),
        "not_measured": not_measured(report),
        "trained": not stages["reinforce"]["refused"],
        "seed": run.experiment.seed,
        "episodes": stages["imagined_after"]["episodes"],
        "wall_s": {
            "imitate": stages["imitate"]["wall_s"],
            "reinforce": stage_seconds(run.dir, "reinforce"),
            "eval": evaluation_seconds(run.dir),
        },
        "command": (run.dir / COMMAND_FILE).read_text().strip(),
    }
