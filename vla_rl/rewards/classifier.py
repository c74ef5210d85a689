"""The success classifier: from one observation's images and instruction to the probability that the task is done."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from policies.compact_encoder import CompactEncoderConfig
from sims.numbers.ranges import Count, Interval, NonNegativeFloat, PositiveFloat, PositiveInt, Share, SomeNames
from sims.vector_env import Observation
from vla_rl.rewards.scorer import Scorer, Sensors


@dataclass(frozen=True, kw_only=True)
class SuccessClassifierConfig:
    """Settings of the fit and of what is made of it.

    ``cameras``: which it needs; null: all that were recorded. ``instruction``: whether it reads the instruction.
    ``state``: whether it reads the robot's state. ``backbone``: pretrained encoder to start from, a file or "tabletop";
    null: from random weights. ``train_encoder``: whether the fit changes the encoder, or its head alone.

    ``success_steps``: observations up to this many control steps before an episode's success show success too, for
    environments that wait so long before they say so. ``early_steps``: observations up to this many steps before those
    are unclear: they are not fitted to, and to declare success there is right. ``min_successes``: successful episodes
    needed.

    ``mined_steps``: updates after the first ``steps``, in which the negatives that were taken for success are drawn
    more often. ``shift``: training images are shifted by up to this many pixels.

    ``every``: control steps between two classified observations. ``consecutive``: as many of them in a row must be
    above the threshold. ``precision``: share of declared successes that are right on held-out episodes; the threshold
    has the best recall at it. ``held_out``: share of all starts for the threshold, and as many again for the report.
    """

    cameras: SomeNames | None = None
    instruction: bool = True
    state: bool = False
    backbone: Literal["tabletop"] | Path | None = None
    train_encoder: bool = True
    encoder: CompactEncoderConfig = field(default_factory=lambda: CompactEncoderConfig(width=128))
    success_steps: Count = 0
    early_steps: Count = 0
    min_successes: Annotated[int, Interval(ge=6, le=10**9)] = 10
    steps: PositiveInt = 600
    mined_steps: Count = 300
    batch_size: Annotated[int, Interval(ge=4, le=10**9)] = 128
    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.05
    shift: Annotated[int, Interval(ge=0, le=4096)] = 2
    precision: Share = 0.95
    every: PositiveInt = 4
    consecutive: PositiveInt = 2
    held_out: Annotated[float, Interval(gt=0, lt=0.5)] = 0.2


class SuccessClassifier(Scorer):
    """``scale`` and ``offset`` calibrate its logits (Platt 1999); with ``threshold`` they are set after the fit."""

    WHAT = "success classifier"
    scale: Tensor
    offset: Tensor
    threshold: Tensor

    def __init__(self, config: SuccessClassifierConfig, sensors: Sensors) -> None:
        super().__init__(config, sensors)
        self.config = config
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("offset", torch.tensor(0.0))
        self.register_buffer("threshold", torch.tensor(0.5))

    @torch.no_grad()
    def probability(self, obs: Observation) -> Float[Tensor, " B"]:
        """Of success, calibrated; ``obs.images``: of ``sensors.cameras``."""
        return torch.sigmoid(self.scale * self.logit(obs) + self.offset)
