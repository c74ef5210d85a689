"""Fit of the success classifier: balanced batches, then a second round with mined negatives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from policies.device import default_generator, restore_generator
from policies.schedule import cosine_schedule
from sims.devices.crossing import crossing, read_numbers
from vla_rl.replay.augmentation import shift_images
from vla_rl.rewards.classifier import SuccessClassifier
from vla_rl.rewards.labels import ClassifierBatch, LabeledEpisodes
from world_models.training.optimization import Optimization

WARMUP = 50  # updates in which the learning rate rises
SMOOTHING = 0.02  # of the labels: people and simulators err about the exact frame
AT_ONCE = 256  # observations that are classified at once


class ClassifierFit(Optimization[ClassifierBatch]):
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
        config = model.config
        trained = model.parameters() if config.train_encoder else model.head.parameters()
        optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
        super().__init__(model, optimizer, steps=steps, seed=seed, max_grad_norm=1.0)
        self.model, self.recorded, self._rate = model, recorded, rate
        self._kinds = [positives, *(kind for kind in negatives if len(kind))]
        model.train()

    def learning_rate(self) -> float:
        schedule = cosine_schedule(self.step, steps=self.steps, warmup=WARMUP)
        return self._rate * self.model.config.learning_rate * schedule

    def draw(self) -> ClassifierBatch:
        size, kinds = self.model.config.batch_size, len(self._kinds) - 1
        which = np.concatenate([np.zeros(size // 2, dtype=np.int64), 1 + np.arange(size - size // 2) % kinds])
        chosen = [self._kinds[kind][self._rng.integers(len(self._kinds[kind]))] for kind in which.tolist()]
        return self.recorded.read(np.array(chosen))

    def loss(self, examples: ClassifierBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        shifted = shift_images(examples, self.model.config.shift, self._generator)
        logit = self.model.logit(shifted.obs)
        target = examples.success.float() * (1 - 2 * SMOOTHING) + SMOOTHING
        accuracy = ((logit > 0) == examples.success).float().mean()
        return F.binary_cross_entropy_with_logits(logit, target), read_numbers({"accuracy": accuracy})

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"dropout": default_generator(self.device).get_state()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        dropout = state["dropout"]
        assert isinstance(dropout, Tensor)
        restore_generator(default_generator(self.device), dropout)


@torch.no_grad()
@crossing("evaluation")
def logits(model: SuccessClassifier, recorded: LabeledEpisodes, index: Int[np.ndarray, " N"]) -> Float[Tensor, " N"]:
    """Of these observations, on the host, before calibration."""
    model.eval()
    parts = [recorded.read(index[i : i + AT_ONCE]).obs.to(model.device) for i in range(0, len(index), AT_ONCE)]
    return torch.cat([torch.zeros(0), *(model.logit(obs).cpu() for obs in parts)])


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
