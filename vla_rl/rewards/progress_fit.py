"""A progress model is fitted to recorded successes, and judged on other episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation
from vla_rl.replay.augmentation import shift_images
from vla_rl.rewards.declared import rate
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.progress import ProgressModel
from vla_rl.rewards.scorer_fit import ScorerFit, logits
from world_models.statistics import auc

LOW_SUCCESS = 0.1  # quantile of the successes' last progress that a failure must stay below


@dataclass(frozen=True, kw_only=True)
class ProgressBatch(TensorDataclass):
    """``obs.images``: of the chosen cameras."""

    obs: Observation
    progress: Float[Tensor, "*B"]


class ProgressFit(ScorerFit[ProgressBatch]):
    """Cross-entropy to ``targets``, those of ``progress_targets``; ``index``: observations of successes."""

    def __init__(
        self,
        model: ProgressModel,
        recorded: LabeledEpisodes,
        targets: Float[np.ndarray, " F"],
        index: Int[np.ndarray, " N"],
        *,
        seed: int,
    ) -> None:
        super().__init__(model, model.config, steps=model.config.steps, seed=seed)
        self.model, self.recorded, self._targets, self._index = model, recorded, targets, index

    def draw(self) -> ProgressBatch:
        config = self.model.config
        chosen = self._index[self._rng.integers(len(self._index), size=config.batch_size)]
        obs, progress = self.recorded.read(chosen).obs, torch.from_numpy(self._targets[chosen])
        if config.instruction:
            count = round(config.other_instructions * config.batch_size)
            other = self.recorded.episode[self._index[self._rng.integers(len(self._index), size=count)]]
            instruction = obs.instruction.clone()
            instruction[:count] = self.recorded.instructions[torch.from_numpy(other)]
            changed = (instruction != obs.instruction).any(1)
            obs.instruction[:], progress = instruction, torch.where(changed, 0.0, progress)
        return ProgressBatch(obs=obs, progress=progress)

    def loss(self, examples: ProgressBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        shifted = shift_images(examples, self.model.config.shift, self._generator)
        return F.binary_cross_entropy_with_logits(self.model.logit(shifted.obs), examples.progress), {}


def assess_progress(
    model: ProgressModel, recorded: LabeledEpisodes, targets: Float[np.ndarray, " F"], index: Int[np.ndarray, " N"]
) -> dict[str, Any]:
    """{value_order_correlation, error, failure_auc, high_failures, blank_instruction}, of whole episodes.

    ``value_order_correlation``: rank correlation of progress and time, mean over successes (GVL, Ma et al. 2024,
    arXiv:2411.04549). ``error``: mean absolute difference from the targets, in successes. ``failure_auc``: whether the
    last progress of an episode tells successes from failures. ``high_failures``: share of the failures that ever come
    as high as the lowest tenth of the successes ends: a policy that is paid by progress will look for these.
    ``blank_instruction``: as ``error``, without the instruction: near to ``error`` where it is not used.
    """
    score = torch.sigmoid(logits(model, recorded, index)).numpy()
    episodes, step, truth = recorded.episode[index], recorded.step[index], targets[index]
    blank = torch.sigmoid(logits(model, recorded, index, blank=True)).numpy()
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
        "error": float(np.abs(score - truth)[known].mean()),
        "blank_instruction": float(np.abs(blank - truth)[known].mean()),
        "failure_auc": None,
        "high_failures": rate(0, 0),
    }
    if won.any() and not won.all():
        bar = float(np.quantile(np.array(last)[won], LOW_SUCCESS))
        report["failure_auc"] = auc(torch.tensor(last), torch.from_numpy(won))
        report["high_failures"] = rate(int((np.array(highest)[~won] >= bar).sum()), int((~won).sum()))
    return report


def rank_correlation(a: Float[np.ndarray, " N"], b: Int[np.ndarray, " N"]) -> float:
    """Spearman's, of values without ties in ``b``; 0 where ``a`` is constant."""
    ranks = [np.argsort(np.argsort(values, kind="stable"), kind="stable") for values in (a, b)]
    return 0.0 if np.ptp(a) == 0 else float(np.corrcoef(ranks[0], ranks[1])[0, 1])
