"""Camera images in the size of a policy's input, and observations of one arm."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from torch import Tensor

from sims.errors import UserError
from sims.vector_env import Observation, encode_instructions


class UnreadableImages(UserError):
    """The newest images of the cameras cannot be read; later ones may be."""


@contextmanager
def reading_images() -> Iterator[None]:
    """UnreadableImages in place of the errors of what decodes and scales images."""
    try:
        yield
    except (ValueError, OSError) as error:
        raise UnreadableImages(f"an image cannot be read: {error}") from error


def fit_image(
    image: UInt8[np.ndarray, "image_height image_width 3"], size: Sequence[int]
) -> UInt8[Tensor, "height width 3"]:
    """The largest centered crop of the wanted aspect ratio, scaled with antialiasing. ``size``: (height, width)."""
    height, width = size
    scale = min(image.shape[0] / height, image.shape[1] / width)
    rows, columns = round(height * scale), round(width * scale)
    top, left = (image.shape[0] - rows) // 2, (image.shape[1] - columns) // 2
    crop = torch.from_numpy(image[top : top + rows, left : left + columns].copy())
    if (rows, columns) == (height, width):
        return crop
    # uint8 throughout: ten times faster than in float, and at most one gray level different
    scaled = F.interpolate(crop.permute(2, 0, 1)[None], size=(height, width), mode="bilinear", antialias=True)
    return scaled[0].permute(1, 2, 0).contiguous()


def observation_of(
    images: UInt8[np.ndarray, "cameras height width 3"], state: Float[np.ndarray, " state_dim"], instruction: str
) -> Observation:
    """As of one environment."""
    return Observation(
        images=torch.from_numpy(images)[None],
        state=torch.from_numpy(state.copy())[None],
        instruction=encode_instructions([instruction]),
    )


def images_problem(taken_s: float | None, max_age_s: float, *, now_s: float) -> str:
    """Why images taken at ``taken_s`` [s], None if there are none, are not what the cameras see now, or ""."""
    if taken_s is None:
        return "no image from some camera"
    age_s = now_s - taken_s
    return "" if abs(age_s) <= max_age_s else f"images are {age_s:.2f} s old"
