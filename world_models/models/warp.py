"""Projective warps of images, and images as cells of pixels."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor


def to_cells(images: Float[Tensor, "B C height width"], patch: int) -> Float[Tensor, "B C cells pixels"]:
    """Cells of ``patch`` x ``patch`` pixels, the pixels of each contiguous."""
    batch, channels, height, width = images.shape
    parts = images.reshape(batch, channels, height // patch, patch, width // patch, patch)
    return parts.transpose(3, 4).reshape(batch, channels, -1, patch**2)


def pixel_coordinates(height: int, width: int) -> Float[Tensor, "3 height width"]:
    """Homogeneous coordinates of the pixels: x and y in [-1, 1], and 1."""
    y, x = torch.meshgrid(torch.linspace(-1, 1, height), torch.linspace(-1, 1, width), indexing="ij")
    return torch.stack([x, y, torch.ones_like(x)])


def mean_trace(matrix: Float[Tensor, "*B 3 3"]) -> Float[Tensor, "*B 3 3"]:
    """A third of the trace times the identity; ``matrix`` minus it has trace 0."""
    mean = matrix.diagonal(dim1=-2, dim2=-1).mean(-1)
    return mean[..., None, None] * torch.eye(3, device=matrix.device)


def warp(
    images: Float[Tensor, "B C h w"], matrix: Float[Tensor, "B 3 3"], coordinates: Float[Tensor, "3 rows columns"]
) -> Float[Tensor, "B C rows columns"]:
    """out(p) = images(matrix p) at all ``coordinates`` p, bilinear; beyond the edges the edge pixels repeat."""
    moved = matrix @ coordinates.flatten(1)
    grid = (moved[:, :2] / moved[:, 2:].clamp(min=0.1)).unflatten(2, coordinates.shape[1:])
    return F.grid_sample(images, grid.movedim(1, -1), padding_mode="border", align_corners=True)
