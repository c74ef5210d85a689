"""In what precision the matrices of a network are stored."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import nn

from policies.device import Precision

M = TypeVar("M", bound=nn.Module)


def lower_precision(one: Precision, other: Precision) -> Precision:
    return "bfloat16" if "bfloat16" in (one, other) else "float32"


def embedding(vocabulary: int, width: int, precision: Precision) -> nn.Embedding:
    """Of tokens, with vectors of length about 1."""
    table = nn.Embedding(vocabulary, width)
    nn.init.normal_(table.weight, std=width**-0.5)
    return store_matrices(table, precision)


def store_matrices(module: M, precision: Precision) -> M:
    """``module`` with its matrices in ``precision``, in place; norms and biases stay float32, as in openpi."""
    for parameter in module.parameters():
        if parameter.ndim > 1 and precision == "bfloat16":
            parameter.data = parameter.data.to(torch.bfloat16)
    return module
