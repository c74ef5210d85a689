"""Camera images as the published models were trained to see them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

Padding = Literal["center", "left_top"]


def resize_with_pad(
    images: UInt8[Tensor, "N height width 3"], side: int, *, padding: Padding, antialias: bool
) -> Float[Tensor, "N 3 side side"]:
    """In [-1, 1]: scaled to fit a square of ``side`` pixels with its aspect kept, the rest black (-1).

    ``padding``: openpi centers the image, SmolVLA puts it at the lower right. ``antialias`` True with rounding is the
    bilinear filter of PIL, which openpi's clients use; False is ``torch.nn.functional.interpolate``, LeRobot's.
    """
    height, width = images.shape[1:3]
    x = images.movedim(-1, 1).float()
    if (height, width) != (side, side):
        ratio = max(height, width) / side
        size = (int(height / ratio), int(width / ratio))
        x = F.interpolate(x, size=size, mode="bilinear", align_corners=False, antialias=antialias)
        x = x.round().clamp(0, 255) if antialias else x
        x = F.pad(x, _margins(side - size[0], side - size[1], padding))
    return x / 127.5 - 1


def _margins(rows: int, columns: int, padding: Padding) -> tuple[int, int, int, int]:
    """Left, right, top, bottom."""
    if padding == "left_top":
        return columns, 0, rows, 0
    return columns // 2, columns - columns // 2, rows // 2, rows - rows // 2


def resize_bicubic(images: UInt8[Tensor, "N height width 3"], side: int) -> Float[Tensor, "N 3 side side"]:
    """In [0, 1]: stretched to a square of ``side`` pixels by PIL's bicubic filter (OpenVLA's processor)."""
    x = images.movedim(-1, 1).float()
    if images.shape[1:3] != (side, side):
        x = F.interpolate(x, size=(side, side), mode="bicubic", align_corners=False, antialias=True)
        x = x.round().clamp(0, 255)
    return x / 255


def standardize_colors(
    images: Float[Tensor, "N 3 height width"], mean: Sequence[float], std: Sequence[float]
) -> Float[Tensor, "N 3 height width"]:
    """Each color by its own mean and deviation, as plain numbers: nothing is copied to the device."""
    colors = zip(images.unbind(1), mean, std, strict=True)
    return torch.stack([(image - center) / spread for image, center, spread in colors], dim=1)
