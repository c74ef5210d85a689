"""Settings that every simulator with a MuJoCo model has."""

from __future__ import annotations

from dataclasses import dataclass, field

from sims.mujoco.detail import Detail
from sims.mujoco.randomization import MujocoRandomization
from sims.numbers.ranges import ImageSize


@dataclass(frozen=True, kw_only=True)
class MujocoConfig:
    image_size: ImageSize
    fast_rendering: bool = True
    detail: Detail = "full"
    randomization: MujocoRandomization = field(default_factory=MujocoRandomization)
