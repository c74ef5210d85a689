"""Fit of the success classifier: balanced batches, then a second round with mined negatives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sims.devices.crossing import crossing, read_numbers
from vla_rl.replay.augmentation import shift_images
from vla_rl.rewards.classifier import SuccessClassifier
from vla_rl.rewards.labels import LabeledBatch, LabeledEpisodes
from vla_rl.rewards.scorer_fit import ScorerFit, logits

SMOOTHING = 0.02  # of the labels: people and simulators err about the exact frame


class ClassifierFit(ScorerFit[LabeledBatch]):
    """Cross-entropy; one half of each batch are ``positives``, the rest ``negatives``, every kind of them alike.

    ``rate``: factor on the learning rate.
    """

    def __init__(
        self,
        model: SuccessClassifier,
        recorded: LabeledEpisodes,
        *,
        positives: Int[np.ndarray, " P"],
        negatives: Sequence[Int[np.ndarray, " _"]],
        steps: int,
        seed: int,
        rate: float = 1.0,
    ) -> None:
        super().__init__(model, steps=steps, seed=seed, rate=rate)
        self.model, self.recorded = model, recorded
        self._kinds = [positives, *(kind for kind in negatives if len(kind))]

    def draw(self) -> LabeledBatch:
        size, kinds = self.model.config.batch_size, len(self._kinds) - 1
        which = np.concatenate([np.zeros(size // 2, dtype=np.int64), 1 + np.arange(size - size // 2) % kinds])
        chosen = [self._kinds[kind][self._rng.integers(len(self._kinds[kind]))] for kind in which.tolist()]
        return self.recorded.read(np.array(chosen))

    def loss(self, examples: LabeledBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        shifted = shift_images(examples, self.model.config.shift, self._generator)
        logit = self.model.logit(shifted.obs)
        target = examples.success.float() * (1 - 2 * SMOOTHING) + SMOOTHING
        accuracy = ((logit > 0) == examples.success).float().mean()
        return F.binary_cross_entropy_with_logits(logit, target), read_numbers({"accuracy": accuracy})


def probabilities(
    model: SuccessClassifier, recorded: LabeledEpisodes, index: Int[np.ndarray, " N"]
) -> Float[Tensor, " N"]:
    """Of success, calibrated, on the host."""
    with crossing("evaluation"):
        scale, offset = model.scale.item(), model.offset.item()
    return torch.sigmoid(scale * logits(model, recorded, index) + offset)


def mined(
    model: SuccessClassifier, recorded: LabeledEpisodes, negatives: Int[np.ndarray, " N"]
) -> Int[np.ndarray, " n"]:
    """Those that ``model`` takes for success: more likely than not."""
    return negatives[(logits(model, recorded, negatives) > 0).numpy()]
