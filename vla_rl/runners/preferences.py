"""Fit a reward model to preferences between recorded observations, and evaluate it on other episodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool

from episodes.files import write_json
from episodes.store import EpisodeStore
from policies.device import CPU, Device
from sims.numbers.seeding import spawn_seed
from vla_rl.rewards.bundle import PREFERENCES, REPORT, save_reward_model
from vla_rl.rewards.declared import rate
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.preferences.fit import PreferenceFit, pair_accuracy, set_scale
from vla_rl.rewards.preferences.model import FileLabelsConfig, PreferenceConfig, PreferenceModel
from vla_rl.rewards.preferences.pairs import NO_PREFERENCE, Labels, Pairs, draw_pairs, read_pairs, write_pairs
from vla_rl.rewards.preferences.truth import TruthLabels, TruthLabelsConfig
from vla_rl.rewards.preferences.vlm import VlmLabels, VlmLabelsConfig
from vla_rl.rewards.progress.assessment import assess_progress
from vla_rl.rewards.progress.model import ProgressConfig, progress_targets
from vla_rl.rewards.scorer import RewardModelError
from vla_rl.runners.fit import run_fit
from vla_rl.runners.reward import check_successes, new_reward_model, reward_fit_folder
from vla_rl.runs.progress import progress

PAIRS = "pairs.jsonl"
AT_ONCE = 32  # pairs that are labeled between two writes of the file


# How the pairs are labeled that are drawn; those of a file are labeled already.
LABELERS: Mapping[type[Any], Callable[[LabeledEpisodes, Any, Device], Labels]] = {
    TruthLabelsConfig: TruthLabels,
    VlmLabelsConfig: VlmLabels,
}


def fit_preferences(
    config: PreferenceConfig, stores: Sequence[Path], folder: Path, *, seed: int, device: Device = CPU
) -> dict[str, Any]:
    """``vla-rl reward fit-preferences``: model, pairs and report in ``folder``; started again, it continues.

    Raises RewardModelError where the episodes or the pairs do not suffice.
    """
    opened = [EpisodeStore(path) for path in stores]
    recorded = LabeledEpisodes(opened, cameras=config.cameras, success_steps=config.success_steps)
    check_successes(recorded, config)
    held_out = np.zeros(len(recorded), dtype=bool)
    held_out[recorded.parts(config.held_out)["report"]] = True
    pairs = _pairs(config, recorded, held_out, seed=seed)
    truth = np.append(recorded.success, pairs.rows)
    with reward_fit_folder(folder / "fit", config, recorded, truth, seed=seed):
        if not isinstance(config.labels, FileLabelsConfig):
            pairs = _labeled(pairs, recorded, config, folder / "fit" / PAIRS, device)
        fitted, reported = _divided(pairs, held_out)
        torch.manual_seed(spawn_seed(seed, "preferences"))
        index = np.flatnonzero(~held_out)
        model = new_reward_model(PreferenceModel(config, recorded.sensors), config.backbone, recorded, index)
        fit = PreferenceFit(device.place(model), recorded, fitted, seed=spawn_seed(seed, "fit"))
        run_fit(fit, folder / "fit", title="preferences", shown="accuracy")
    set_scale(model, recorded, index)
    report = {
        "preferences": str(folder),
        "sha256": save_reward_model(PREFERENCES, model, folder, tasks=recorded.tasks),
        **_evaluated(model, recorded, reported, device),
        **assess_progress(model, recorded, progress_targets(recorded, ProgressConfig()), np.flatnonzero(held_out)),
        "data": {"fit": len(fitted), "report": len(reported), "no_preference": len(pairs) - len(pairs.decided())},
    }
    write_json(folder / REPORT, report)
    return report


def _pairs(
    config: PreferenceConfig, recorded: LabeledEpisodes, held_out: Bool[np.ndarray, " F"], *, seed: int
) -> Pairs:
    """Of the file that ``config`` names, or drawn and without labels."""
    if isinstance(config.labels, FileLabelsConfig):
        return read_pairs(config.labels.path, recorded)
    return draw_pairs(recorded, held_out, config.pairs, np.random.default_rng(spawn_seed(seed, "pairs")))


def _labeled(pairs: Pairs, recorded: LabeledEpisodes, config: PreferenceConfig, path: Path, device: Device) -> Pairs:
    """The file ``path`` keeps those that are labeled, and labeling goes on where it stopped."""
    label = LABELERS[type(config.labels)](recorded, config.labels, device)
    done = read_pairs(path, recorded) if path.exists() else Pairs(pairs.rows[:0])
    with progress("pairs", len(pairs), done=len(done)) as advance:
        while len(done) < len(pairs):
            block = Pairs(pairs.rows[len(done) : len(done) + AT_ONCE])
            new = np.column_stack([block.rows[:, :2], label(block.first, block.second)])
            done = Pairs(np.concatenate([done.rows, new]))
            write_pairs(path, done, recorded)
            advance(len(block))
    return done


def _divided(pairs: Pairs, held_out: Bool[np.ndarray, " F"]) -> tuple[Pairs, Pairs]:
    """Those with a preference to fit to, and to report on. RewardModelError where there are none of either."""
    known = pairs.decided().rows
    sides = held_out[known[:, :2]].sum(axis=1)
    fitted, reported = Pairs(known[sides == 0]), Pairs(known[sides == 2])
    if not len(fitted) or not len(reported):
        raise RewardModelError(
            f"of {len(pairs)} pairs {len(known)} have a preference, {len(fitted)} of them among the episodes to fit to "
            f"and {len(reported)} among the held-out ones; both need some: label more pairs"
        )
    return fitted, reported


def _evaluated(model: PreferenceModel, recorded: LabeledEpisodes, reported: Pairs, device: Device) -> dict[str, Any]:
    """{accuracy, truth_accuracy, label_accuracy}: model by labels, model by the truth, labels by the truth."""
    truth = TruthLabels(recorded, TruthLabelsConfig(), device)
    known = np.column_stack([reported.rows[:, :2], truth(reported.first, reported.second)])
    both = known[:, 2] != NO_PREFERENCE
    return {
        "accuracy": pair_accuracy(model, recorded, reported),
        "truth_accuracy": pair_accuracy(model, recorded, Pairs(known)),
        "label_accuracy": rate(int((known == reported.rows)[both, 2].sum()), int(both.sum())),
    }
