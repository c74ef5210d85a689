"""A preference model is fitted to labeled pairs, and evaluated on others."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sims.devices.crossing import crossing, read_numbers
from vla_rl.replay.augmentation import shift_images
from vla_rl.rewards.declared import rate
from vla_rl.rewards.labels import LabeledBatch, LabeledEpisodes
from vla_rl.rewards.preferences.model import PreferenceModel
from vla_rl.rewards.preferences.pairs import Pairs
from vla_rl.rewards.scorer_fit import ScorerFit, logits


class PreferenceFit(ScorerFit[LabeledBatch]):
    """-log P(preferred one) by the formula of model.py; pairs without preference are left out."""

    def __init__(self, model: PreferenceModel, recorded: LabeledEpisodes, pairs: Pairs, *, seed: int) -> None:
        super().__init__(model, steps=model.config.steps, seed=seed)
        self.model, self.recorded = model, recorded
        known = pairs.decided()
        self._better = np.where(known.preferred == 1, known.second, known.first)
        self._worse = np.where(known.preferred == 1, known.first, known.second)

    def draw(self) -> LabeledBatch:
        """``batch_size`` preferred observations, then what each of them is preferred to."""
        chosen = self._rng.integers(len(self._better), size=self.model.config.batch_size)
        return self.recorded.read(np.concatenate([self._better[chosen], self._worse[chosen]]))

    def loss(self, examples: LabeledBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        shifted = shift_images(examples, self.model.config.shift, self._generator)
        better, worse = self.model.logit(shifted.obs).chunk(2)
        return F.softplus(worse - better).mean(), read_numbers({"accuracy": (better > worse).float().mean()})


def set_scale(model: PreferenceModel, recorded: LabeledEpisodes, index: Int[np.ndarray, " N"]) -> None:
    """``mean`` and ``spread`` of ``model``, of its rewards of these observations."""
    reward = logits(model, recorded, index)
    with crossing("weights"):
        model.mean.fill_(reward.mean().item())
        model.spread.fill_(max(reward.std().item(), 1e-6))


def pair_accuracy(model: PreferenceModel, recorded: LabeledEpisodes, pairs: Pairs) -> dict[str, Any]:
    """Share of the pairs with a preference that ``model`` orders so, with its Wilson interval.

    The interval takes pairs for independent; those that share an episode are not quite.
    """
    known = pairs.decided()
    first, second = (logits(model, recorded, which) for which in (known.first, known.second))
    right = (second > first).numpy() == (known.preferred == 1)
    return rate(int(right.sum()), len(known))
