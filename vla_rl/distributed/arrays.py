"""Tensors as NumPy arrays, which Ray's object store ships without a copy; a torch tensor costs it one on each side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass

R = TypeVar("R", bound=TensorDataclass)


def to_array(tensor: Tensor) -> np.ndarray:
    """A view where ``tensor`` is on the CPU; bfloat16, which NumPy lacks, as its bits in int16."""
    with crossing("weights"):
        tensor = tensor.detach().cpu()
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def to_tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A copy: arrays from the object store are read-only."""
    tensor = torch.from_numpy(np.array(array))
    return tensor.view(dtype) if dtype == torch.bfloat16 else tensor


@dataclass(frozen=True)
class PackedTensors:
    """Named tensors."""

    arrays: Mapping[str, np.ndarray]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PackedTensors:
        arrays = {name: to_array(tensor) for name, tensor in tensors.items()}
        return PackedTensors(arrays, {name: tensor.dtype for name, tensor in tensors.items()})

    def unpack(self) -> dict[str, Tensor]:
        return {name: to_tensor(array, self.dtypes[name]) for name, array in self.arrays.items()}


@dataclass(frozen=True)
class PackedRecord(Generic[R]):
    """A record of tensors. ``shape``: the same record without entries, which says what belongs where."""

    shape: R
    arrays: list[np.ndarray]

    @classmethod
    def of(cls, record: R) -> PackedRecord[R]:
        shape = record.map(lambda tensor: tensor[:0].cpu().clone())
        return PackedRecord(shape, [to_array(tensor) for tensor in record.tensors()])

    def unpack(self) -> R:
        arrays = iter(self.arrays)
        return self.shape.map(lambda tensor: to_tensor(next(arrays), tensor.dtype))
