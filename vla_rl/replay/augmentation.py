"""Random shifts of stored images (Yarats et al. 2021, DrQ-v2: pad by repeating the border, crop at random)."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation

R = TypeVar("R", bound=TensorDataclass)


def shift_images(record: R, pixels: int, generator: torch.Generator) -> R:
    """``record`` with the images of every Observation in it shifted by up to ``pixels`` either way, each on its own."""
    if isinstance(record, Observation):
        return dataclasses.replace(record, images=_shift(record.images, pixels, generator))
    parts = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}  # type: ignore[arg-type]
    changed = {
        name: shift_images(part, pixels, generator) for name, part in parts.items() if isinstance(part, TensorDataclass)
    }
    return dataclasses.replace(record, **changed)  # type: ignore[type-var]


def _shift(
    images: UInt8[Tensor, "B cameras height width 3"], pixels: int, generator: torch.Generator
) -> UInt8[Tensor, "B cameras height width 3"]:
    """All cameras of an observation move alike."""
    batch, _, height, width, _ = images.shape
    moved = torch.randint(-pixels, pixels + 1, (2, batch, 1), generator=generator, device=images.device)
    rows = (torch.arange(height, device=images.device) + moved[0]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + moved[1]).clamp(0, width - 1)
    every = torch.arange(batch, device=images.device)
    shifted = images.movedim(1, -1)[every[:, None, None], rows[:, :, None], columns[:, None, :]]
    return shifted.movedim(-1, 1)
