"""How good a model of progress is on recorded episodes, whatever it is."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int

from sims.devices.crossing import crossing
from sims.numbers.statistics import auc
from vla_rl.rewards.declared import rate
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.progress.env import Progress

LOW_SUCCESS = 0.1  # quantile of the successes' last progress that a failure must stay below
AT_ONCE = 256  # observations


def assess_progress(
    model: Progress, recorded: LabeledEpisodes, targets: Float[np.ndarray, " F"], index: Int[np.ndarray, " N"]
) -> dict[str, Any]:
    """``recorded`` has the cameras that ``model`` needs, and no others; ``targets``: those of ``progress_targets``.

    {value_order_correlation, error, failure_auc, high_failures, blank_instruction}, of whole episodes.

    ``value_order_correlation``: rank correlation of progress and time, mean over successes (GVL, Ma et al. 2024,
    arXiv:2411.04549). ``error``: mean absolute difference from the targets, in successes. ``failure_auc``: whether the
    last progress of an episode tells successes from failures. ``high_failures``: share of the failures that ever come
    as high as the lowest tenth of the successes ends: a policy that is paid by progress will look for these.
    ``blank_instruction``: as ``error``, without the instruction: near to ``error`` where it is not used. None where
    there are no episodes to tell it.
    """
    score, blank = (recorded_progress(model, recorded, index, blank=without) for without in (False, True))
    episodes, step, truth = recorded.episode[index], recorded.step[index], targets[index]
    order, last, highest, succeeded = [], [], [], []
    for episode in np.unique(episodes):
        here = episodes == episode
        succeeded.append(bool(recorded.succeeded[episode]))
        last.append(float(score[here][-1]))
        highest.append(float(score[here].max()))
        if succeeded[-1] and len(np.unique(step[here])) > 2:
            order.append(rank_correlation(score[here], step[here]))
    won, known = np.array(succeeded), ~np.isnan(truth)
    report = {
        "value_order_correlation": float(np.mean(order)) if order else None,
        "error": float(np.abs(score - truth)[known].mean()) if known.any() else None,
        "blank_instruction": float(np.abs(blank - truth)[known].mean()) if known.any() else None,
        "failure_auc": None,
        "high_failures": rate(0, 0),
    }
    if won.any() and not won.all():
        bar = float(np.quantile(np.array(last)[won], LOW_SUCCESS))
        report["failure_auc"] = auc(torch.tensor(last), torch.from_numpy(won))
        report["high_failures"] = rate(int((np.array(highest)[~won] >= bar).sum()), int((~won).sum()))
    return report


@torch.no_grad()
@crossing("evaluation")
def recorded_progress(
    model: Progress, recorded: LabeledEpisodes, index: Int[np.ndarray, " N"], *, blank: bool
) -> Float[np.ndarray, " N"]:
    """Of these observations; ``blank``: without their instructions."""
    parts = [torch.zeros(0)]
    for first in range(0, len(index), AT_ONCE):
        obs = recorded.read(index[first : first + AT_ONCE]).obs.to(model.device)
        shown = dataclasses.replace(obs, instruction=torch.zeros_like(obs.instruction)) if blank else obs
        parts.append(model.progress(shown).cpu())
    return torch.cat(parts).numpy()


def rank_correlation(a: Float[np.ndarray, " N"], b: Int[np.ndarray, " N"]) -> float:
    """Spearman's, in which equal values share their average rank; 0 where ``a`` or ``b`` is constant."""
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        return 0.0
    return float(np.corrcoef(_average_ranks(a), _average_ranks(b))[0, 1])


def _average_ranks(values: np.ndarray) -> Float[np.ndarray, " N"]:
    """From 1 on; equal values have the mean of the ranks that they occupy."""
    _, which, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: np.ndarray = np.cumsum(count) - (count - 1) / 2
    return ranks[which]
