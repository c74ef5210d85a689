"""Number types of settings and options that declare what is allowed; the loader checks it and the reference lists it.

``num_envs: PositiveInt = 8``. A range of a single setting is written at the setting: ``Annotated[float, Interval(gt=0,
le=1)]``. Every float of a configuration is finite without saying so.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any


@dataclass(frozen=True, kw_only=True)
class Interval:
    """Limits of a number: at least ``ge`` or above ``gt``, at most ``le`` or below ``lt``.

    pydantic reads it by the protocol of ``annotated_types``, which worker processes of simulators do not have.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    __is_annotated_types_grouped_metadata__ = True

    def __iter__(self) -> Iterator[Any]:
        import annotated_types

        for limit, kind in (("ge", "Ge"), ("gt", "Gt"), ("le", "Le"), ("lt", "Lt")):
            if (value := getattr(self, limit)) is not None:
                yield getattr(annotated_types, kind)(value)


@dataclass(frozen=True, kw_only=True)
class Distinct:
    """Of a list: ``least`` entries or more, none of them twice."""

    least: int = 0

    def check(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """``values``; ValueError where they are too few or one is there twice."""
        if len(values) < self.least:
            raise ValueError(f"must have at least {self.least} entry, got none")
        if twice := [value for value in values if values.count(value) > 1]:
            raise ValueError(f"must have every entry once, got {twice[0]!r} {values.count(twice[0])} times")
        return values

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))


LARGEST = 10**9  # of counts: more is a slip of the keyboard, and far below what overflows

Count = Annotated[int, Interval(ge=0, le=LARGEST)]
PositiveInt = Annotated[int, Interval(ge=1, le=LARGEST)]
Width = Annotated[int, Interval(ge=1, le=16384)]
"""Of a layer of a network, or its number of heads, tokens or bins."""
Depth = Annotated[int, Interval(ge=1, le=256)]
Seed = Annotated[int, Interval(ge=0, le=2**32 - 1)]
Pixels = Annotated[int, Interval(ge=1, le=4096)]
ImageSize = tuple[Pixels, Pixels]
"""(height, width)."""

Names = Annotated[tuple[str, ...], Distinct()]
SomeNames = Annotated[tuple[str, ...], Distinct(least=1)]

PositiveFloat = Annotated[float, Interval(gt=0)]
NonNegativeFloat = Annotated[float, Interval(ge=0)]
Share = Annotated[float, Interval(ge=0, le=1)]
PartialShare = Annotated[float, Interval(ge=0, lt=1)]
