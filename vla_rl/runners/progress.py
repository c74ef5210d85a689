"""Fit a progress model to recorded successes, and judge it on other episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from episodes.store import EpisodeStore
from policies.device import CPU, Device
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from vla_rl.rewards.bundle import PROGRESS, REPORT, load_reward_model, save_reward_model
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.progress.assessment import assess_progress
from vla_rl.rewards.progress.env import Progress
from vla_rl.rewards.progress.fit import ProgressFit
from vla_rl.rewards.progress.model import ProgressConfig, ProgressModel, progress_targets
from vla_rl.rewards.registry import PROGRESS_MODELS
from vla_rl.rewards.scorer import RewardModelError
from vla_rl.runners.fit import run_fit
from vla_rl.runners.reward import new_reward_model, note_fit
from vla_rl.runs.run_dir import write_json


def fit_progress(
    config: ProgressConfig, stores: Sequence[Path], folder: Path, *, seed: int, device: Device = CPU
) -> dict[str, Any]:
    """``vla-rl reward fit-progress``: the model and its report in ``folder``; started again, it continues.

    Raises RewardModelError where the episodes do not suffice.
    """
    opened = [EpisodeStore(path) for path in stores]
    recorded = LabeledEpisodes(opened, cameras=config.cameras, success_steps=config.success_steps)
    targets = progress_targets(recorded, gripper=config.gripper)
    if (successes := int(recorded.succeeded.sum())) < config.min_successes:
        raise RewardModelError(
            f"the episodes hold {successes} successes, min_successes is {config.min_successes}; record more"
        )
    parts = recorded.parts(config.held_out)
    index = np.concatenate([parts["fit"], parts["threshold"]])
    index = index[~np.isnan(targets[index])]
    note_fit(folder / "fit", config, recorded, targets, seed=seed)
    torch.manual_seed(spawn_seed(seed, "progress"))
    model = device.place(new_reward_model(ProgressModel(config, recorded.sensors), config.backbone, recorded, index))
    fit = ProgressFit(model, recorded, targets, index, seed=spawn_seed(seed, "fit"))
    run_fit(fit, folder / "fit", title="progress", shown="loss")
    tasks = tuple(sorted({entry.task for entry in recorded.entries}))
    sha256 = save_reward_model(PROGRESS, model, folder, tasks=tasks)
    report = {
        "progress": str(folder),
        "sha256": sha256,
        **assess_progress(model.eval(), recorded, targets, parts["report"]),
        "data": {"successes": successes, "episodes": len(recorded.entries)},
    }
    write_json(folder / REPORT, report)
    return report


def assess_progress_stores(path: Path, stores: Sequence[Path], *, device: Device = CPU) -> dict[str, Any]:
    """``vla-rl reward evaluate FOLDER --stores`` of a fitted model: on all observations of these stores."""
    model = load_reward_model(PROGRESS, path, device)
    config = model.config
    return _assess(model, stores, success_steps=config.success_steps, gripper=config.gripper)


def assess_reward(config: Any, stores: Sequence[Path], *, device: Device = CPU) -> dict[str, Any]:
    """The same of a configured reward, of which progress is the share of the time to success. UserError."""
    if type(config) not in PROGRESS_MODELS:
        names = ", ".join(one.name for one in PROGRESS_MODELS)
        raise UserError(f"reward {config.name} tells no progress; reward.name must be one of {names}")
    return _assess(PROGRESS_MODELS[type(config)](config, device), stores, success_steps=0, gripper=None)


def _assess(model: Progress, stores: Sequence[Path], *, success_steps: int, gripper: int | None) -> dict[str, Any]:
    opened = [EpisodeStore(path) for path in stores]
    sensors = LabeledEpisodes(opened).sensors
    cameras = [sensors.cameras[i] for i in model.cameras_among(sensors, f"the store {stores[0]}")]
    recorded = LabeledEpisodes(opened, cameras=cameras, success_steps=success_steps)
    return assess_progress(model, recorded, progress_targets(recorded, gripper=gripper), np.arange(len(recorded)))
