"""What does a world model lose when it predicts in one denoising step instead of four?

    python benchmarks/distillation.py RUN [--fit-steps 1500] [--distill-steps 600]

RUN: a finished run of ``vla-rl train configs/imagined_*.yaml`` whose first world model is fitted. It was fitted for one
step, so it is first fitted further at all noise levels and becomes the teacher of four steps. Three models are compared
on held-out episodes: the teacher in four steps, the same network in one, and the student distilled to one. PSNR open
loop, AUC of recorded actions, imagined success of the run's policies from the same starts, speed. Each model's
thresholds are set on the calibration episodes. Writes benchmarks/results/distillation.json.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from sims.numbers.statistics import auc
from sims.registry import make_env
from vla_rl.bench.record import row, write_record
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.runners.imagined_success import compare_success
from vla_rl.runners.world_model import WORLD_MODEL_FILE, open_clips
from world_models.bundle import FittedWorldModel, load_world_model, save_world_model
from world_models.data.clip import first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.action_sequences import recorded_sequences, true_outcomes
from world_models.evaluation.imagined_success import imagined_success, set_thresholds
from world_models.evaluation.open_loop import frames_per_second, open_loop_errors
from world_models.models.flow_model import FlowWorldModel
from world_models.training.distillation import Distillation, DistillConfig
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig, PredictionFit

HORIZONS, TEACHER_STEPS, STARTS = (1, 2, 4, 8), 4, 60


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--fit-steps", type=int, default=1500)
    parser.add_argument("--distill-steps", type=int, default=600)
    arguments = parser.parse_args()
    experiment = load_config(Experiment, arguments.run / "config.yaml", [])
    assert experiment.imagination is not None
    settings, folder = experiment.imagination.model, arguments.run / "imagination" / "round_0"
    fitted = load_world_model(folder / WORLD_MODEL_FILE)
    clips = open_clips([folder / "episodes"], settings.dynamics, "fit")

    teacher = fit_all_noise_levels(
        fitted.dynamics, settings.fit, clips, steps=arguments.fit_steps, seed=experiment.seed
    )
    undistilled = copy.deepcopy(teacher)
    undistilled.config = replace(teacher.config, steps=1)
    student = copy.deepcopy(teacher)
    config = DistillConfig(batch_size=settings.fit.batch_size, steps=arguments.distill_steps)
    run_all(Distillation(student, config, clips, seed=experiment.seed))

    models = {"four steps": teacher, "one step, not distilled": undistilled, "one step, distilled": student}
    found = {name: measured(model, fitted, experiment, arguments.run) for name, model in models.items()}
    rows = []
    for name, figures in found.items():
        for what, value in figures.items():
            rows.append(row(f"{what}, {name}", value, what.split("[")[1].rstrip("]"), against="four steps"))
            rows[-1]["difference"] = value - found["four steps"][what]
    command = f"python benchmarks/distillation.py RUN --fit-steps {arguments.fit_steps}"
    command += f" --distill-steps {arguments.distill_steps}"
    print(write_record("distillation", rows, command=command, tasks=list(experiment.sim.tasks), seed=experiment.seed))


def fit_all_noise_levels(
    model: FlowWorldModel, fit: DynamicsFitConfig, clips: ClipSampler, *, steps: int, seed: int
) -> FlowWorldModel:
    """The model after further updates at all noise levels, to be sampled in several steps."""
    model.config = replace(model.config, steps=TEACHER_STEPS)
    config = replace(fit, steps=steps, full_noise=0.2, roll_in_from=0.0, learning_rate=fit.learning_rate / 2)
    run_all(DynamicsFit(model, config, clips, seed=seed))
    return model


def run_all(fit: PredictionFit) -> None:
    while fit.step < fit.steps:
        metrics = fit.update()
        if fit.step % 100 == 0:
            print(type(fit).__name__, fit.step, round(metrics["frame"], 4), flush=True)


def measured(model: FlowWorldModel, fitted: FittedWorldModel, experiment: Experiment, run: Path) -> dict[str, float]:
    """On the run's held-out episodes, and of its policies from their starts; names end in units."""
    assert experiment.imagination is not None
    settings, reward_model, seed = experiment.imagination.model, fitted.reward_model, experiment.seed
    model.eval()
    stores, every = [run / "imagination" / "round_0" / "episodes"], settings.imagined_env.reward_every
    calibration, held_out = (open_clips(stores, settings.dynamics, part) for part in ("calibration", "held_out"))
    set_thresholds(model, reward_model, calibration, seed=seed, reward_every=every)
    figures = {
        f"psnr after {one['horizon']} chunks [dB]": one["psnr"]
        for one in open_loop_errors(model, held_out, horizons=HORIZONS, locate=None, seed=seed)
        if "psnr" in one  # an episode is so long
    }
    sequences = recorded_sequences(held_out)
    outcomes = imagined_success(model, reward_model, held_out, sequences, seed=seed, reward_every=every)
    truth = true_outcomes(held_out, sequences)
    figures |= {
        "AUC of recorded actions [1]": auc(outcomes.score, truth),
        "success of recorded actions [1]": outcomes.success.float().mean().item(),
    }
    bundles = policies(run)
    rates = imagined_rates(model, fitted, experiment, stores, list(bundles.values()))
    for name, rate in zip(bundles, rates, strict=True):
        figures[f"imagined success, {name} [1]"] = rate
    clip = held_out.draw(np.random.default_rng(seed), 32, 1)
    rate = frames_per_second(model, first_history(model, clip), clip.action[:, 0], clip.length[:, 0])
    return figures | {"speed at batch 32 [pictures/s]": rate}


def policies(run: Path) -> dict[str, Path]:
    found = {
        "imitation": run / "imitation" / "bundle",
        "successes imitated": run / "imagination" / "round_0" / "clone" / "bundle",
        "improved": run / "bundle",
    }
    return {name: bundle for name, bundle in found.items() if bundle.exists()}


def imagined_rates(
    model: FlowWorldModel, fitted: FittedWorldModel, experiment: Experiment, stores: list[Path], bundles: list[Path]
) -> list[float]:
    """Success of policies that act in this world model."""
    assert experiment.imagination is not None
    env = make_env(experiment.sim)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / WORLD_MODEL_FILE
            settings, reference = experiment.imagination.model, fitted.info.reference_error
            every = settings.imagined_env.reward_every
            save_world_model(
                model, fitted.reward_model, path, reference_error=reference, metrics={}, reward_every=every
            )
            found = compare_success(
                settings,
                Path(folder),
                stores,
                env=env,
                bundles=bundles,
                count=STARTS,
                seed=experiment.seed,
            )
    finally:
        env.close()
    return [policy["imagined"] for policy in found["policies"]]


if __name__ == "__main__":
    main()
