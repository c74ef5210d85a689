"""Tensors as NumPy arrays, which Ray's object store ships without a copy; a torch tensor costs it one on each side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from vla_rl.rollouts.collector import ActedChunk
from vla_rl.rollouts.experience import Experience

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


@dataclass(frozen=True, eq=False)
class PackedTensors(Mapping[str, Tensor]):
    """Named tensors, each of which is copied when it is read, and not before."""

    arrays: Mapping[str, np.ndarray]
    dtypes: Mapping[str, torch.dtype]

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor]) -> PackedTensors:
        arrays = {name: to_array(tensor) for name, tensor in tensors.items()}
        return PackedTensors(arrays, {name: tensor.dtype for name, tensor in tensors.items()})

    def __getitem__(self, name: str) -> Tensor:
        return to_tensor(self.arrays[name], self.dtypes[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)

    def __len__(self) -> int:
        return len(self.arrays)


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
        pairs = zip(self.arrays, self.shape.tensors(), strict=True)
        return self.shape.with_tensors(to_tensor(array, tensor.dtype) for array, tensor in pairs)


@dataclass(frozen=True)
class PackedChunk:
    """An ActedChunk."""

    experience: PackedRecord[Experience]
    action: np.ndarray
    timed_out: list[int]
    final: PackedRecord[Any] | None
    cut_off: list[int]

    @classmethod
    def of(cls, chunk: ActedChunk) -> PackedChunk:
        final = None if chunk.final is None else PackedRecord.of(chunk.final)
        experience, action = PackedRecord.of(chunk.experience), to_array(chunk.action)
        return PackedChunk(experience, action, chunk.timed_out, final, chunk.cut_off)

    def unpack(self, device: torch.device) -> ActedChunk:
        return ActedChunk(
            experience=self.experience.unpack().to(device),
            action=to_tensor(self.action, torch.float32).to(device),
            timed_out=self.timed_out,
            final=None if self.final is None else self.final.unpack().to(device),
            cut_off=self.cut_off,
        )
