"""What does a world model lose when it imagines in one denoising step instead of four?

    python benchmarks/distillation.py RUN [--fit-steps 1500] [--distill-steps 600]

RUN: a finished run of ``vla-rl train configs/imagined_*.yaml`` whose first world model is fitted. It was fitted for one
step, so it goes on with the fit at all noise levels first and becomes the teacher of four steps. Then three worlds, on
held-out episodes: the teacher in four steps, the same network in one, the student that was distilled to one. PSNR open
loop, AUC of recorded actions, imagined success of the run's policies from the same starts, speed. Each world's
thresholds are set on the calibration episodes. Writes benchmarks/results/distillation.json.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from sims.registry import make_env
from vla_rl.bench.record import row, write_record
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.runners.imagination import compare_success
from vla_rl.runners.world_model import WORLD_FILE, open_clips
from world_models.bundle import FittedWorld, load_world, save_world
from world_models.data.clips import ClipSampler
from world_models.fidelity import frames_per_second, imagined_success, open_loop, own_scripts, set_thresholds
from world_models.models.flow_model import FlowWorld
from world_models.reward_model import auc
from world_models.training.distill import DistillConfig, Distiller
from world_models.training.fit import FitConfig, Fitter, first_moment

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
    fitted, clips = load_world(folder / WORLD_FILE), open_clips([folder / "episodes"], settings, "fit")

    teacher = taught(fitted.world, settings.fit, clips, steps=arguments.fit_steps, seed=experiment.seed)
    hasty = copy.deepcopy(teacher)
    hasty.config = replace(teacher.config, steps=1)
    student = copy.deepcopy(teacher)
    config = DistillConfig(batch_size=settings.fit.batch_size, steps=arguments.distill_steps)
    updated(Distiller(student, config, clips, seed=experiment.seed))

    worlds = {"four steps": teacher, "one step, not distilled": hasty, "one step, distilled": student}
    found = {name: measured(world, fitted, experiment, arguments.run) for name, world in worlds.items()}
    rows = []
    for name, figures in found.items():
        for what, value in figures.items():
            rows.append(row(f"{what}, {name}", value, what.split("[")[1].rstrip("]"), against="four steps"))
            rows[-1]["difference"] = value - found["four steps"][what]
    command = f"python benchmarks/distillation.py RUN --fit-steps {arguments.fit_steps}"
    command += f" --distill-steps {arguments.distill_steps}"
    print(write_record("distillation", rows, command=command, tasks=list(experiment.sim.tasks), seed=experiment.seed))


def taught(world: FlowWorld, fit: FitConfig, clips: ClipSampler, *, steps: int, seed: int) -> FlowWorld:
    """The world after further fitting at all noise levels, to be sampled in several steps."""
    world.config = replace(world.config, steps=TEACHER_STEPS)
    config = replace(fit, steps=steps, full_noise=0.2, roll_in_from=0.0, learning_rate=fit.learning_rate / 2)
    updated(Fitter(world, config, clips, seed=seed))
    return world


def updated(fitter: Fitter) -> None:
    while fitter.step < fitter.steps:
        metrics = fitter.update()
        if fitter.step % 100 == 0:
            print(type(fitter).__name__, fitter.step, round(metrics["frame"], 4), flush=True)


def measured(world: FlowWorld, fitted: FittedWorld, experiment: Experiment, run: Path) -> dict[str, float]:
    """On the run's held-out episodes, and of its policies from their starts; names end in units."""
    assert experiment.imagination is not None
    settings, world, outcome, seed = experiment.imagination.model, world.eval(), fitted.outcome, experiment.seed
    stores, every = [run / "imagination" / "round_0" / "episodes"], settings.imagined.verdict_every
    calibration, held_out = (open_clips(stores, settings, part) for part in ("calibration", "held_out"))
    set_thresholds(world, outcome, calibration, seed=seed, every=every)
    figures = {
        f"psnr after {one['horizon']} chunks [dB]": one["psnr"]
        for one in open_loop(world, held_out, horizons=HORIZONS, locate=None, seed=seed)
    }
    won, score = imagined_success(world, outcome, held_out, own_scripts(held_out), seed=seed, every=every)
    truth = torch.tensor([entry.success for entry in held_out.entries])
    figures |= {
        "AUC of recorded actions [1]": auc(score, truth),
        "success of recorded actions [1]": won.float().mean().item(),
    }
    bundles = policies(run)
    rates = imagined_rates(world, fitted, experiment, stores, list(bundles.values()))
    for name, rate in zip(bundles, rates, strict=True):
        figures[f"imagined success, {name} [1]"] = rate
    clip = held_out.draw(np.random.default_rng(seed), 32, 1)
    rate = frames_per_second(world, first_moment(world, clip), clip.action[:, 0], clip.length[:, 0])
    return figures | {"speed at batch 32 [pictures/s]": rate}


def policies(run: Path) -> dict[str, Path]:
    found = {
        "imitation": run / "imitation" / "bundle",
        "successes imitated": run / "imagination" / "round_0" / "imitation" / "bundle",
        "improved": run / "bundle",
    }
    return {name: bundle for name, bundle in found.items() if bundle.exists()}


def imagined_rates(
    world: FlowWorld, fitted: FittedWorld, experiment: Experiment, stores: list[Path], bundles: list[Path]
) -> list[float]:
    """Success of policies that act in this world."""
    assert experiment.imagination is not None
    env = make_env(experiment.sim)
    try:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / WORLD_FILE
            save_world(world, fitted.outcome, path, usual_error=fitted.info.usual_error, metrics={})
            found = compare_success(
                experiment.imagination.model,
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
