"""Random shifts of stored images (Yarats et al. 2021, DrQ-v2: pad by repeating the border, crop at random)."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import torch
from jaxtyping import UInt8
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass

R = TypeVar("R", bound=TensorDataclass)


def shift_images(record: R, pixels: int, generator: torch.Generator) -> R:
    """``record`` with all ``images`` in it shifted by up to ``pixels`` either way, those of each entry on their own."""
    changed: dict[str, Tensor | TensorDataclass] = {}
    for field in dataclasses.fields(record):  # type: ignore[arg-type]
        part = getattr(record, field.name)
        if isinstance(part, TensorDataclass):
            changed[field.name] = shift_images(part, pixels, generator)
        elif field.name == "images":
            changed[field.name] = _shift(part, pixels, generator)
    return dataclasses.replace(record, **changed)  # type: ignore[type-var]


def _shift(
    images: UInt8[Tensor, "B *frames height width 3"], pixels: int, generator: torch.Generator
) -> UInt8[Tensor, "B *frames height width 3"]:
    """All frames of an entry, of several cameras and of a policy's memory, move alike."""
    batch, height, width = len(images), *images.shape[-3:-1]
    moved = torch.randint(-pixels, pixels + 1, (2, batch, 1), generator=generator, device=images.device)
    rows = (torch.arange(height, device=images.device) + moved[0]).clamp(0, height - 1)
    columns = (torch.arange(width, device=images.device) + moved[1]).clamp(0, width - 1)
    every = torch.arange(batch, device=images.device)
    frames = images.flatten(1, -4).movedim(1, -1)
    shifted = frames[every[:, None, None], rows[:, :, None], columns[:, None, :]]
    return shifted.movedim(-1, 1).reshape(images.shape)
