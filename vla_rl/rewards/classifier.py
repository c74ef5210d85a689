"""The success classifier: from one observation's images and instruction to the probability that the task is done."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from sims.numbers.ranges import Count, PositiveInt, Share
from sims.vector_env import Observation
from vla_rl.rewards.scorer import Scorer, ScorerConfig, Sensors


@dataclass(frozen=True, kw_only=True)
class SuccessClassifierConfig(ScorerConfig):
    """Settings of the fit and of what is made of it.

    ``early_steps``: observations up to this many steps before those that show success are unclear: they are not fitted
    to, and to declare success there is right. ``mined_steps``: updates after the first ``steps``, in which the
    negatives that were taken for success are drawn more often.

    ``every``: control steps between two classified observations. ``consecutive``: as many of them in a row must be
    above the threshold. ``precision``: share of declared successes that are right on held-out episodes; the threshold
    has the best recall at it. ``held_out``: share of all starts for the threshold, and as many again for the report.
    """

    early_steps: Count = 0
    mined_steps: Count = 300
    precision: Share = 0.95
    every: PositiveInt = 4
    consecutive: PositiveInt = 2


class SuccessClassifier(Scorer):
    """``scale`` and ``offset`` calibrate its logits (Platt 1999); with ``threshold`` they are set after the fit."""

    WHAT = "success classifier"
    config: SuccessClassifierConfig
    scale: Tensor
    offset: Tensor
    threshold: Tensor

    def __init__(self, config: SuccessClassifierConfig, sensors: Sensors) -> None:
        super().__init__(config, sensors)
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("offset", torch.tensor(0.0))
        self.register_buffer("threshold", torch.tensor(0.5))

    @torch.no_grad()
    def probability(self, obs: Observation) -> Float[Tensor, " B"]:
        """Of success, calibrated; ``obs.images``: of ``sensors.cameras``."""
        return torch.sigmoid(self.scale * self.logit(obs) + self.offset)
