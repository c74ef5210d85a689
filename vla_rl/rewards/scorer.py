"""What the learned rewards share: a number from one observation's images and instruction.

Its encoder is a compact encoder. Where it reads the robot's state too (``state``), a policy can be paid for moving the
arm to where it was in successful episodes.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policies.compact_encoder import CompactEncoder, CompactEncoderConfig
from policies.device import OnDevice
from policies.normalizer import Normalizer
from sims.errors import UserError
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


@runtime_checkable
class ScorerConfig(Protocol):
    """The settings that every model has."""

    @property
    def encoder(self) -> CompactEncoderConfig: ...
    @property
    def instruction(self) -> bool: ...
    @property
    def state(self) -> bool: ...
    @property
    def train_encoder(self) -> bool: ...


class Scorer(OnDevice):
    """``WHAT``: its name in messages."""

    WHAT: ClassVar[str]

    def __init__(self, settings: ScorerConfig, sensors: Sensors) -> None:
        super().__init__()
        self._settings, self.sensors = settings, sensors
        self.encoder = CompactEncoder(settings.encoder, cameras=len(sensors.cameras), state_dim=sensors.state_dim)
        self.normalizer = Normalizer(state_dim=sensors.state_dim, action_dim=1)
        width = self.encoder.pooled_width
        self.head = nn.Sequential(nn.Linear(width, HIDDEN), nn.GELU(), nn.Dropout(0.1), nn.Linear(HIDDEN, 1))

    def logit(self, obs: Observation) -> Float[Tensor, " B"]:
        """``obs.images``: of ``sensors.cameras``."""
        settings = self._settings
        state = self.normalizer.normalize_state(obs.state) * settings.state
        instruction = obs.instruction * settings.instruction
        with self.autocast(), torch.set_grad_enabled(torch.is_grad_enabled() and settings.train_encoder):
            pooled = self.encoder(dataclasses.replace(obs, instruction=instruction), state).pooled
        return self.head(pooled.float())[:, 0]

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
        if self._settings.state and sensors.state_dim != wanted.state_dim:
            raise RewardModelError(
                f"the {self.WHAT} reads states of {wanted.state_dim} numbers, those of {where} have {sensors.state_dim}"
            )
        return [sensors.cameras.index(name) for name in wanted.cameras]


def _size(image_size: tuple[int, int]) -> str:
    return f"{image_size[0]} x {image_size[1]}"
