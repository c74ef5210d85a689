"""The success classifier: from one observation's images and instruction to the probability that the task is done.

Its encoder is a compact encoder. Where it reads the robot's state too (``state``), a policy can be paid for moving the
arm to where it was in successful episodes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policies.compact_encoder import CompactEncoder, CompactEncoderConfig
from policies.device import OnDevice
from policies.normalizer import Normalizer
from sims.errors import UserError
from sims.numbers.ranges import Count, Interval, NonNegativeFloat, PositiveFloat, PositiveInt, Share, SomeNames
from sims.vector_env import EnvSpec, Observation

HIDDEN = 128


class ClassifierError(UserError):
    """A success classifier that cannot be fitted, read or used here. The message says why."""


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


@dataclass(frozen=True, kw_only=True)
class Sensors:
    """What was recorded of the robot that the classifier is for. ``image_size``: (height, width)."""

    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    state_dim: int


class SuccessClassifier(OnDevice):
    """``scale`` and ``offset`` calibrate its logits (Platt 1999); with ``threshold`` they are set after the fit."""

    scale: Tensor
    offset: Tensor
    threshold: Tensor

    def __init__(self, config: SuccessClassifierConfig, sensors: Sensors) -> None:
        super().__init__()
        self.config, self.sensors = config, sensors
        self.encoder = CompactEncoder(config.encoder, cameras=len(sensors.cameras), state_dim=sensors.state_dim)
        self.normalizer = Normalizer(state_dim=sensors.state_dim, action_dim=1)
        width = self.encoder.pooled_width
        self.head = nn.Sequential(nn.Linear(width, HIDDEN), nn.GELU(), nn.Dropout(0.1), nn.Linear(HIDDEN, 1))
        self.register_buffer("scale", torch.tensor(1.0))
        self.register_buffer("offset", torch.tensor(0.0))
        self.register_buffer("threshold", torch.tensor(0.5))

    def logit(self, obs: Observation) -> Float[Tensor, " B"]:
        """Before calibration; ``obs.images``: of ``sensors.cameras``."""
        state = self.normalizer.normalize_state(obs.state) * self.config.state
        instruction = obs.instruction * self.config.instruction
        with self.autocast(), torch.set_grad_enabled(torch.is_grad_enabled() and self.config.train_encoder):
            pooled = self.encoder(dataclasses.replace(obs, instruction=instruction), state).pooled
        return self.head(pooled.float())[:, 0]

    @torch.no_grad()
    def probability(self, obs: Observation) -> Float[Tensor, " B"]:
        """Of success, calibrated; ``obs.images``: of ``sensors.cameras``."""
        return torch.sigmoid(self.scale * self.logit(obs) + self.offset)

    def cameras_in(self, spec: EnvSpec) -> list[int]:
        """Which of the environment's cameras it needs. ClassifierError where they do not fit."""
        sensors = Sensors(cameras=spec.cameras, image_size=spec.image_size, state_dim=spec.state_dim)
        check_sensors(self, sensors, spec.name)
        return [spec.cameras.index(name) for name in self.sensors.cameras]


def check_sensors(model: SuccessClassifier, sensors: Sensors, where: str) -> None:
    """ClassifierError unless ``sensors``, those of ``where``, are what ``model`` needs."""
    wanted = model.sensors
    if missing := [name for name in wanted.cameras if name not in sensors.cameras]:
        raise ClassifierError(
            f"the success classifier needs camera {missing[0]!r}, which {where} does not have; it has "
            f"{', '.join(sensors.cameras) or 'none'}"
        )
    if sensors.image_size != wanted.image_size:
        raise ClassifierError(
            f"the success classifier was fitted to images of {_size(wanted.image_size)} pixels, those of {where} have "
            f"{_size(sensors.image_size)}"
        )
    if model.config.state and sensors.state_dim != wanted.state_dim:
        raise ClassifierError(
            f"the success classifier reads states of {wanted.state_dim} numbers, those of {where} have "
            f"{sensors.state_dim}"
        )


def _size(image_size: tuple[int, int]) -> str:
    return f"{image_size[0]} x {image_size[1]}"
