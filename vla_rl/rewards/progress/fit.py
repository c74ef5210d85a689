"""A progress model is fitted to recorded successes."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation
from vla_rl.replay.augmentation import shift_images
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.progress.model import ProgressModel
from vla_rl.rewards.scorer_fit import ScorerFit


@dataclass(frozen=True, kw_only=True)
class ProgressBatch(TensorDataclass):
    """``obs.images``: of the chosen cameras."""

    obs: Observation
    progress: Float[Tensor, "*B"]


class ProgressFit(ScorerFit[ProgressBatch]):
    """Cross-entropy to ``targets``, those of ``progress_targets``; ``index``: observations of successes.

    Instructions are exchanged between tasks alone: of one task another one may be the same goal in other words.
    """

    def __init__(
        self,
        model: ProgressModel,
        recorded: LabeledEpisodes,
        targets: Float[np.ndarray, " F"],
        index: Int[np.ndarray, " N"],
        *,
        seed: int,
    ) -> None:
        super().__init__(model, steps=model.config.steps, seed=seed)
        self.model, self.recorded, self._targets, self._index = model, recorded, targets, index
        self._task = np.array([entry.task for entry in recorded.entries])

    def draw(self) -> ProgressBatch:
        config = self.model.config
        chosen = self._index[self._rng.integers(len(self._index), size=config.batch_size)]
        obs, progress = self.recorded.read(chosen).obs, torch.from_numpy(self._targets[chosen])
        if config.instruction:
            count = round(config.other_instructions * config.batch_size)
            own = self.recorded.episode[chosen[:count]]
            other = self.recorded.episode[self._index[self._rng.integers(len(self._index), size=count)]]
            shown = np.where(self._task[other] == self._task[own], own, other)
            instruction = obs.instruction.clone()
            instruction[:count] = self.recorded.instructions[torch.from_numpy(shown)]
            progress = torch.where((instruction != obs.instruction).any(1), 0.0, progress)
            obs = dataclasses.replace(obs, instruction=instruction)
        return ProgressBatch(obs=obs, progress=progress)

    def loss(self, examples: ProgressBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        shifted = shift_images(examples, self.model.config.shift, self._generator)
        return F.binary_cross_entropy_with_logits(self.model.logit(shifted.obs), examples.progress), {}
