"""Does reinforcement learning of the world model itself (RLIR) make it follow actions better?

    python benchmarks/rlir.py RUN [--iterations 60] [--learning-rate 3e-5]

RUN: a finished or stopped run of ``vla-rl train configs/imagined_*.yaml`` on the tabletop whose first world model is
fitted. Two inverse dynamics models are fitted and must pass the gate: one gives the reward, the other, of another seed,
only measures. Before and after, on held-out episodes: error of the recovered actions, object error and PSNR, open loop.
For comparison, from the same weights and for as much processor time: further updates of the ordinary fit. Where the
gate is not passed, only its errors are written. Writes benchmarks/results/rlir.json.
"""

from __future__ import annotations

import argparse
import copy
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from sims.errors import UserError
from sims.registry import ObjectLocator, object_locator
from vla_rl.algorithms.rlir import RLIR, RLIRConfig
from vla_rl.bench.record import row, write_record
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.runners.world_model import EPISODES, WORLD_MODEL_FILE, open_clips
from world_models.bundle import load_world_model
from world_models.data.clip import Clip, first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.open_loop import open_loop_errors
from world_models.models.flow_model import FlowWorldModel
from world_models.models.inverse_dynamics import InverseDynamics, InverseDynamicsConfig, to_pixels
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig
from world_models.training.inverse_dynamics import InverseDynamicsFit, gate

HORIZONS = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--iterations", type=int, default=60)
    parser.add_argument("--learning-rate", type=float, default=3e-5)
    parser.add_argument("--inverse-steps", type=int, default=1500)
    arguments = parser.parse_args()
    experiment = load_config(Experiment, arguments.run / "config.yaml", [])
    assert experiment.imagination is not None
    settings = experiment.imagination.model
    world, stores = first_world_model(arguments.run)
    clips, held_out = (open_clips(stores, settings.dynamics, part) for part in ("fit", "held_out"))
    fitted = load_world_model(world)
    locate = object_locator(experiment.sim, fitted.info.robot.cameras)

    inverse_config = InverseDynamicsConfig(steps=arguments.inverse_steps)
    inverses, gates = [], []
    for seed in (0, 1):
        torch.manual_seed(seed)
        inverse = InverseDynamics(inverse_config, fitted.info.robot)
        fit = InverseDynamicsFit(inverse, clips, seed=seed)
        while fit.step < fit.steps:
            fit.update()
        inverse.eval()
        inverses.append(inverse)
        gates.append(gate(inverse, held_out, seed=seed))
        print(gates[-1])

    command = f"python benchmarks/rlir.py RUN --iterations {arguments.iterations}"
    command += f" --learning-rate {arguments.learning_rate} --inverse-steps {arguments.inverse_steps}"
    about: dict[str, Any] = {"command": command, "tasks": list(experiment.sim.tasks), "seed": experiment.seed}
    if failed := [one for one in gates if not one["passed"]]:
        errors = failed[0]["errors"]
        rows = [
            row(f"gate, {name}", error, "1", ratio=error / errors["true"], against="true")
            for name, error in errors.items()
        ]
        print("the gate is not passed:", write_record("rlir", rows, **about))
        return

    def measure(model: FlowWorldModel) -> dict[str, float]:
        return action_errors(model, inverses[1], held_out) | image_errors(model, held_out, locate)

    before = measure(fitted.dynamics)
    print("before", before)
    reinforced, curve, spent = reinforce(
        fitted.dynamics, inverses[0], clips, held_out, arguments.iterations, arguments.learning_rate
    )
    after = measure(reinforced)
    print("after", after)
    further, updates = fit_further(fitted.dynamics, settings.fit, clips, seconds=spent)
    control = measure(further)
    print("further fit", updates, control)

    rows = []
    for label, figures in (("RLIR", after), ("as much further fit", control)):
        for name, value in figures.items():
            was, unit = before[name], name.split()[-1]
            rows.append(row(f"{name}, {label}", value, unit, ratio=value / was, against="before", before=was))
    reward = {"first": mean(curve[:10], "reward"), "last": mean(curve[-10:], "reward")}
    about |= {"gates": gates, "processor_s": spent, "reward": reward, "further_fit_updates": updates}
    print(write_record("rlir", rows, **about))


def first_world_model(run: Path) -> tuple[Path, list[Path]]:
    """Its file, and the stores that the rounds until then recorded. UserError where none is fitted yet."""
    stores = list[Path]()
    while (folder := run / "imagination" / f"round_{len(stores)}").exists():
        stores.append(folder / EPISODES)
        if (world := folder / WORLD_MODEL_FILE).exists():
            return world, stores
    raise UserError(f"{run}: no world model of its rounds is fitted yet; go on with it (vla-rl train --resume)")


def reinforce(
    model: FlowWorldModel,
    inverse: InverseDynamics,
    clips: ClipSampler,
    held_out: ClipSampler,
    iterations: int,
    learning_rate: float,
) -> tuple[FlowWorldModel, list[dict[str, float]], float]:
    """A trained copy of ``model``, the metrics of every iteration, and the processor seconds of all."""
    copied, base = copy.deepcopy(model), RLIRConfig()
    config = replace(base, update=replace(base.update, learning_rate=learning_rate))
    rlir = RLIR(copied, inverse, clips, held_out, config, seed=0)
    began, curve = time.process_time(), []
    for i in range(iterations):
        curve.append(rlir.iterate())
        if i % 10 == 9:
            print(i + 1, {name: round(value, 4) for name, value in curve[-1].items()})
    return copied, curve, time.process_time() - began


def fit_further(
    model: FlowWorldModel, fit: DynamicsFitConfig, clips: ClipSampler, *, seconds: float
) -> tuple[FlowWorldModel, int]:
    """A copy of ``model`` after ordinary updates, from its own predictions too, for so many processor seconds, and
    their number.
    """
    copied = copy.deepcopy(model)
    settings = replace(fit, steps=10**6, learning_rate=1e-4, warmup=1, roll_in_from=0.0)
    further = DynamicsFit(copied, settings, clips, seed=1)
    while further.cpu_s < seconds:
        further.update()
    return copied, further.step


def mean(curve: list[dict[str, float]], name: str) -> float:
    return float(np.mean([one[name] for one in curve]))


@torch.no_grad()
def action_errors(model: FlowWorldModel, inverse: InverseDynamics, clips: ClipSampler) -> dict[str, float]:
    """Error of the actions recovered from one to three consecutive predictions, from recorded observations."""
    rng, generator = np.random.default_rng(0), torch.Generator().manual_seed(0)
    errors: dict[str, list[torch.Tensor]] = {}
    for _ in range(8):
        clip: Clip = clips.draw(rng, 64, 3)
        history = first_history(model, clip)
        for i in range(3):
            action, length = clip.action[:, i], clip.length[:, i]
            imagined = model.sample_chunk(model.prefill(history), action, length, model.noise(64, generator))
            before, after = (to_pixels(model.decode(latent)) for latent in (history.current, imagined.latent))
            error = inverse.error(before, after, action, length)
            errors.setdefault(f"action error after {i + 1} chunks [1]", []).append(error[length > 0])
            history = history.advance(imagined.latent, imagined.state, action, length)
    return {name: torch.cat(parts).mean().item() for name, parts in errors.items()}


def image_errors(model: FlowWorldModel, clips: ClipSampler, locate: ObjectLocator | None) -> dict[str, float]:
    """After the chunks that some of the episodes have; of objects where one moved."""
    found = {}
    for one in open_loop_errors(model, clips, horizons=HORIZONS, locate=locate, seed=0):
        for name, key, unit in (("psnr", "psnr", "dB"), ("object error", "object_error_m", "m")):
            if one.get(key) is not None:
                found[f"{name} after {one['horizon']} chunks [{unit}]"] = one[key]
    return found


if __name__ == "__main__":
    main()
