"""Fit a progress model to recorded successes, and evaluate it on other episodes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from episodes.files import write_json
from episodes.store import EpisodeStore
from policies.device import CPU, Device
from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from vla_rl.rewards.bundle import PROGRESS, REPORT, load_progress_model, save_reward_model
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.progress.assessment import assess_progress
from vla_rl.rewards.progress.env import Progress
from vla_rl.rewards.progress.fit import ProgressFit
from vla_rl.rewards.progress.model import ProgressConfig, ProgressModel, progress_targets
from vla_rl.rewards.registry import PROGRESS_MODELS
from vla_rl.rewards.scorer import RewardModelError
from vla_rl.runners.fit import run_fit
from vla_rl.runners.reward import check_successes, new_reward_model, reward_fit_folder


def fit_progress(
    config: ProgressConfig, stores: Sequence[Path], folder: Path, *, seed: int, device: Device = CPU
) -> dict[str, Any]:
    """``vla-rl reward fit-progress``: the model and its report in ``folder``; started again, it continues.

    Raises RewardModelError where the episodes do not suffice.
    """
    opened = [EpisodeStore(path) for path in stores]
    recorded = LabeledEpisodes(opened, cameras=config.cameras, success_steps=config.success_steps)
    targets = progress_targets(recorded, config)
    check_successes(recorded, config)
    parts = recorded.parts(config.held_out)
    if np.isnan(targets[parts["report"]]).all():
        raise RewardModelError(
            "no success among the held-out starts, on which progress is reported; record more episodes of a task, "
            "or raise held_out"
        )
    index = np.concatenate([parts["fit"], parts["threshold"]])
    index = index[~np.isnan(targets[index])]
    torch.manual_seed(spawn_seed(seed, "progress"))
    model = device.place(new_reward_model(ProgressModel(config, recorded.sensors), config.backbone, recorded, index))
    fit = ProgressFit(model, recorded, targets, index, seed=spawn_seed(seed, "fit"))
    with reward_fit_folder(folder / "fit", config, recorded, targets, seed=seed):
        run_fit(fit, folder / "fit", title="progress", shown="loss")
    sha256 = save_reward_model(PROGRESS, model, folder, tasks=recorded.tasks)
    report = {
        "progress": str(folder),
        "sha256": sha256,
        **assess_progress(model.eval(), recorded, targets, parts["report"]),
        "data": {"successes": int(recorded.succeeded.sum()), "episodes": len(recorded.entries)},
    }
    write_json(folder / REPORT, report)
    return report


def assess_progress_stores(path: Path, stores: Sequence[Path], *, device: Device = CPU) -> dict[str, Any]:
    """``vla-rl reward evaluate FOLDER --stores`` of a fitted model: on all observations of these stores."""
    model = load_progress_model(path, device)
    share_of_time = ProgressConfig(success_steps=model.config.success_steps)
    return _assess(model, stores, model.config if isinstance(model, ProgressModel) else share_of_time)


def assess_reward(config: Any, stores: Sequence[Path], *, device: Device = CPU) -> dict[str, Any]:
    """The same of a configured reward, of which progress is the share of the time to success. UserError."""
    if type(config) not in PROGRESS_MODELS:
        names = ", ".join(one.name for one in PROGRESS_MODELS)
        raise UserError(f"reward {config.name} tells no progress; reward.name must be one of {names}")
    return _assess(PROGRESS_MODELS[type(config)](config, device), stores, ProgressConfig())


def _assess(model: Progress, stores: Sequence[Path], config: ProgressConfig) -> dict[str, Any]:
    """``config``: of the progress that is true."""
    opened = [EpisodeStore(path) for path in stores]
    sensors = LabeledEpisodes(opened).sensors
    cameras = [sensors.cameras[i] for i in model.cameras_among(sensors, f"the store {stores[0]}")]
    recorded = LabeledEpisodes(opened, cameras=cameras, success_steps=config.success_steps)
    return assess_progress(model, recorded, progress_targets(recorded, config), np.arange(len(recorded)))
