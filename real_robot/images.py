"""Observations of one arm, and what is wrong with its images."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from jaxtyping import Float, UInt8

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
