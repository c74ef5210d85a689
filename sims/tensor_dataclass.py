"""Dataclasses of tensors that share their leading dimensions."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor


class TensorDataclass:
    """Mixin for a dataclass whose fields are tensors (or other TensorDataclass, or None) with the same leading dimensions.

    Indexing, stacking and moving then work on the whole record: ``obs[env_ids]``, ``Rollout.stack(steps)``.
    """

    def map(self, function: Callable[[Tensor], Tensor]) -> Self:
        """The same record with ``function`` applied to every tensor in it."""

        def apply(value: Any) -> Any:
            if value is None:
                return None
            return value.map(function) if isinstance(value, TensorDataclass) else function(value)

        fields = dataclasses.fields(self)  # type: ignore[arg-type]
        return dataclasses.replace(self, **{f.name: apply(getattr(self, f.name)) for f in fields})  # type: ignore[type-var]

    def __getitem__(self, index: Any) -> Self:
        return self.map(lambda tensor: tensor[index])

    def tensors(self) -> Iterator[Tensor]:
        """Every tensor of the record, in the order of ``map``."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            if isinstance(value, TensorDataclass):
                yield from value.tensors()
            elif value is not None:
                yield value

    def __len__(self) -> int:
        """Size of the first leading dimension."""
        return len(next(self.tensors()))

    def to(self, device: torch.device | str) -> Self:
        return self.map(lambda tensor: tensor.to(device))

    def detach(self) -> Self:
        return self.map(Tensor.detach)

    @classmethod
    def _combine(cls, rows: Sequence[Self], function: Callable[[list[Tensor]], Tensor]) -> Self:
        def apply(values: list[Any]) -> Any:
            if values[0] is None:
                return None
            return (
                type(values[0])._combine(values, function)
                if isinstance(values[0], TensorDataclass)
                else function(values)
            )

        names = [field.name for field in dataclasses.fields(cls)]  # type: ignore[arg-type]
        return cls(**{name: apply([getattr(row, name) for row in rows]) for name in names})

    @classmethod
    def stack(cls, rows: Sequence[Self]) -> Self:
        """A new leading dimension, as ``torch.stack``."""
        return cls._combine(rows, torch.stack)

    @classmethod
    def cat(cls, rows: Sequence[Self]) -> Self:
        """Along the first dimension, as ``torch.cat``."""
        return cls._combine(rows, torch.cat)
