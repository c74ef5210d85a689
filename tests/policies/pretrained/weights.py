"""Random weights that any program makes again from names and shapes, so that a golden file holds none."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor


def random_weights(shapes: Mapping[str, Sequence[int]], *, norms_around: float) -> dict[str, Tensor]:
    """Matrices of standard deviation fan_in^-1/2, vectors of .1, weights of norms around ``norms_around``.

    numpy's RandomState draws the same numbers in every version.
    """
    weights = {}
    for name, shape in sorted(shapes.items()):
        draw = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(tuple(shape))
        matrix = len(shape) > 1
        scale = np.prod(shape[1:]) ** -0.5 if matrix else 0.1
        is_norm = not matrix and name.endswith("norm.weight")
        weights[name] = torch.from_numpy(scale * draw + (norms_around if is_norm else 0.0)).float()
    return weights
