"""Reading the files of make_goldens.py."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tests.policies.pretrained.weights import random_weights

FOLDER = Path(__file__).parents[2] / "data" / "pretrained"


@dataclass(frozen=True, kw_only=True)
class Golden:
    """``weights`` has the reference's names."""

    weights: dict[str, Tensor]
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]


def read_golden(name: str, *, norms_around: float) -> Golden:
    with np.load(FOLDER / f"{name}.npz") as file:
        arrays = dict(file)
    weights = random_weights(json.loads(str(arrays.pop("shapes"))), norms_around=norms_around)
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    inputs, outputs = (
        {key.removeprefix(part): tensor for key, tensor in tensors.items() if key.startswith(part)}
        for part in ("in_", "out_")
    )
    return Golden(weights=weights, inputs=inputs, outputs=outputs)
