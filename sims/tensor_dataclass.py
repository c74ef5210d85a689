"""Dataclasses of tensors that share their leading dimensions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

R = TypeVar("R", bound="TensorDataclass")  # not Self, which cannot be checked at run time in undecorated classes


@functools.cache
def _names(record: type) -> tuple[str, ...]:
    """Of the fields; looking them up each time costs as much as indexing a small tensor."""
    return tuple(field.name for field in dataclasses.fields(record))


class TensorDataclass:
    """Mixin for a dataclass whose fields are tensors, other TensorDataclass or None, with the same leading dimensions.

    Indexing, stacking and moving apply to every tensor of the record: ``obs[env_ids]``, ``Rollout.stack(steps)``.
    ``ragged`` names the tensor fields whose last dimension may differ between records (text of different lengths):
    ``stack``, ``cat`` and ``where`` pad them with zeros at the end to the longest.
    """

    ragged: ClassVar[tuple[str, ...]] = ()

    def map(self: R, function: Callable[[Tensor], Tensor]) -> R:
        """The same record with ``function`` applied to every tensor in it."""
        record: Any = type(self)
        return record(**{name: _apply(function, getattr(self, name)) for name in _names(record)})

    def __getitem__(self: R, index: Any) -> R:
        """As a tensor's; whole numbers in a tensor count from the front only."""
        return self.map(functools.partial(rows, index=index))

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the record, in the order of ``map``."""
        record: Any = type(self)
        for name in _names(record):
            value = getattr(self, name)
            if isinstance(value, TensorDataclass):
                yield from value.tensors()
            elif value is not None:
                yield value

    def __len__(self) -> int:
        """Size of the first leading dimension."""
        return len(next(self.tensors()))

    def to(self: R, device: torch.device | str) -> R:
        return self.map(lambda tensor: tensor.to(device))

    def with_tensors(self: R, tensors: Iterable[Tensor]) -> R:
        """The same record of these, in the order of ``self.tensors``, each on the device of the one it replaces."""
        given = iter(tensors)
        return self.map(lambda tensor: next(given).to(tensor.device))

    def detach(self: R) -> R:
        return self.map(Tensor.detach)

    def where(self: R, mask: Bool[Tensor, "*N"], other: R) -> R:
        """This record where ``mask`` is True, ``other`` elsewhere; mask: bool, one value per leading index."""
        return type(self)._combine([self, other], functools.partial(_choose, mask))

    @classmethod
    def stack(cls: type[R], records: Sequence[R]) -> R:
        """A new leading dimension, as ``torch.stack``."""
        return cls._combine(records, torch.stack)

    @classmethod
    def cat(cls: type[R], records: Sequence[R]) -> R:
        """Along the first dimension, as ``torch.cat``."""
        return cls._combine(records, torch.cat)

    @classmethod
    def _combine(cls: type[R], records: Sequence[R], function: Callable[[list[Tensor]], Tensor]) -> R:
        """One record whose tensors are ``function`` of the records' tensors of that field.

        Raises ValueError where a field is None in some records only.
        """
        return cls(**{name: cls._combine_field(name, records, function) for name in _names(cls)})  # type: ignore[arg-type]

    @classmethod
    def _combine_field(cls, name: str, records: Sequence[Any], function: Callable[[list[Tensor]], Tensor]) -> Any:
        values = [getattr(record, name) for record in records]
        if any(value is None for value in values):
            if not all(value is None for value in values):
                raise ValueError(f"{cls.__name__}.{name} is None in some of the records only")
            return None
        if isinstance(values[0], TensorDataclass):
            return type(values[0])._combine(values, function)
        return function(pad_to_longest(values) if name in cls.ragged else values)


# Not inside the methods: where types are checked at run time, a local function is prepared anew at each call.


def _apply(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    if value is None:
        return None
    return value.map(function) if isinstance(value, TensorDataclass) else function(value)


def _choose(mask: Tensor, values: list[Tensor]) -> Tensor:
    here, there = values
    return torch.where(mask.reshape(*mask.shape, *[1] * (here.dim() - mask.dim())), here, there)


def rows(tensor: Tensor, index: Any) -> Tensor:
    """``tensor[index]``; rows by number are copied as a whole, of images on a CPU seven times as fast."""
    if isinstance(index, Tensor) and index.dtype == torch.int64 and index.ndim == 1 and index.device == tensor.device:
        return tensor.index_select(0, index)
    return tensor[index]


def pad_to_longest(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The tensors with zeros appended to their last dimension, so that it is as long in all of them."""
    longest = max(tensor.shape[-1] for tensor in tensors)
    return [
        tensor if tensor.shape[-1] == longest else F.pad(tensor, (0, longest - tensor.shape[-1])) for tensor in tensors
    ]
