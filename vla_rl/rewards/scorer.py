"""What the learned rewards share: a number from one observation's images and instruction.

Its encoder is a compact encoder. Where it reads the robot's state too (``state``), a policy can be paid for moving the
arm to where it was in successful episodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policies.compact_encoder import CompactEncoder, CompactEncoderConfig
from policies.device import OnDevice
from policies.normalizer import Normalizer
from sims.devices.crossing import crossing
from sims.errors import UserError
from sims.numbers.ranges import Count, Interval, NonNegativeFloat, PositiveFloat, PositiveInt, SomeNames
from sims.vector_env import EnvSpec, Observation

HIDDEN = 128


class RewardModelError(UserError):
    """A learned reward that cannot be fitted, read or used here. The message says why."""


@dataclass(frozen=True, kw_only=True)
class Sensors:
    """What was recorded of the robot that the model is for. ``image_size``: (height, width)."""

    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    state_dim: int


def sensors_of(spec: EnvSpec) -> Sensors:
    return Sensors(cameras=spec.cameras, image_size=spec.image_size, state_dim=spec.state_dim)


def select_cameras(cameras: Sequence[int], obs: Observation, device: torch.device) -> Observation:
    """``obs`` with the images of these cameras alone, on ``device``."""
    with crossing("observations"):
        images = torch.stack([obs.images[:, camera] for camera in cameras], dim=1)
        return dataclasses.replace(obs, images=images).to(device)


@dataclass(frozen=True, kw_only=True)
class ScorerConfig:
    """Settings of the model and its fit.

    ``cameras``: which it needs; null: all that were recorded. ``instruction``: whether it reads the instruction.
    ``state``: whether it reads the robot's state. ``backbone``: pretrained encoder to start from, a file or "tabletop";
    null: from random weights. ``train_encoder``: whether the fit changes the encoder, or its head alone.

    ``success_steps``: observations up to this many control steps before an episode's success show success too, for
    environments that wait so long before they say so. ``min_successes``: successful episodes needed. ``shift``:
    training images are shifted by up to this many pixels.
    """

    cameras: SomeNames | None = None
    instruction: bool = True
    state: bool = False
    backbone: Literal["tabletop"] | Path | None = None
    train_encoder: bool = True
    encoder: CompactEncoderConfig = field(default_factory=lambda: CompactEncoderConfig(width=128))
    success_steps: Count = 0
    min_successes: Annotated[int, Interval(ge=6, le=10**9)] = 10
    steps: PositiveInt = 600
    batch_size: Annotated[int, Interval(ge=4, le=10**9)] = 128
    learning_rate: PositiveFloat = 1e-3
    weight_decay: NonNegativeFloat = 0.05
    shift: Annotated[int, Interval(ge=0, le=4096)] = 2
    held_out: Annotated[float, Interval(gt=0, lt=0.5)] = 0.2


class Scorer(OnDevice):
    """``WHAT``: its name in messages."""

    WHAT: ClassVar[str]
    config: ScorerConfig

    def __init__(self, config: ScorerConfig, sensors: Sensors) -> None:
        super().__init__()
        self.config, self.sensors = config, sensors
        self.encoder = CompactEncoder(
            config.encoder, cameras=len(sensors.cameras), image_size=sensors.image_size, state_dim=sensors.state_dim
        )
        self.normalizer = Normalizer(state_dim=sensors.state_dim, action_dim=1)
        width = self.encoder.pooled_width
        self.head = nn.Sequential(nn.Linear(width, HIDDEN), nn.GELU(), nn.Dropout(0.1), nn.Linear(HIDDEN, 1))

    def logit(self, obs: Observation) -> Float[Tensor, " B"]:
        """In float32, in which thresholds are chosen, whatever the run's precision. ``obs.images``: of
        ``sensors.cameras``; a state that is not read may have any length."""
        config = self.config
        unread = obs.state.new_zeros(len(obs), self.sensors.state_dim)
        state = self.normalizer.normalize_state(obs.state) if config.state else unread
        instruction = obs.instruction * config.instruction
        with torch.set_grad_enabled(torch.is_grad_enabled() and config.train_encoder):
            pooled = self.encoder(dataclasses.replace(obs, instruction=instruction), state).pooled
        return self.head(pooled)[:, 0]

    def cameras_among(self, sensors: Sensors, where: str) -> list[int]:
        """Which cameras it needs of ``sensors``, those of ``where``. RewardModelError where they do not fit."""
        wanted = self.sensors
        if missing := [name for name in wanted.cameras if name not in sensors.cameras]:
            raise RewardModelError(
                f"the {self.WHAT} needs camera {missing[0]!r}, which {where} does not have; it has "
                f"{', '.join(sensors.cameras) or 'none'}"
            )
        if sensors.image_size != wanted.image_size:
            raise RewardModelError(
                f"the {self.WHAT} was fitted to images of {_size(wanted.image_size)} pixels, those of {where} have "
                f"{_size(sensors.image_size)}"
            )
        if self.config.state and sensors.state_dim != wanted.state_dim:
            raise RewardModelError(
                f"the {self.WHAT} reads states of {wanted.state_dim} numbers, those of {where} have {sensors.state_dim}"
            )
        return [sensors.cameras.index(name) for name in wanted.cameras]


def _size(image_size: tuple[int, int]) -> str:
    return f"{image_size[0]} x {image_size[1]}"
