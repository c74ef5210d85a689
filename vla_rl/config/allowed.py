"""What a setting may be, in words: for error messages, for ``--help`` and for the reference page alike."""

from __future__ import annotations

import typing
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal

from sims.numbers.ranges import Distinct, Interval
from vla_rl.config.schema import union

LIMITS = ("ge", "gt", "le", "lt")
KINDS: Mapping[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text",
    Path: "a path",
    NoneType: "null",
    Any: "anything",
}


def allowed(annotation: Any) -> str:
    """For example "an integer from 1 to 10^9 or null", "one of egl, osmesa", "a list of text"."""
    members = union(_without_discriminator(annotation))
    others = [member for member in members if not is_dataclass(member) and member is not NoneType]
    parts = [_keys(member) if others and is_dataclass(member) else _allowed(member) for member in members]
    return " or ".join(sorted(parts, key=lambda part: part == "null"))


def choices(annotation: Any) -> list[str]:
    """The words that a setting may be, where it may be certain words."""
    named: Mapping[Any, tuple[str, ...]] = {bool: ("true", "false"), NoneType: ("null",)}
    members = [_base(member) for member in union(_without_discriminator(annotation))]
    words = [typing.get_args(base) if typing.get_origin(base) is Literal else named.get(base, ()) for base in members]
    return [str(word) for group in words for word in group]


def interval(annotation: Any) -> Interval:
    """The range that a number declares, here or as pydantic's ``Field(gt=0)``; without limits where it has none."""
    members = (annotation, *union(_base(annotation)))
    extras = [extra for member in members for extra in getattr(member, "__metadata__", ())]
    declared = [one for extra in extras for one in (extra, *getattr(extra, "metadata", ()))]
    limits = [(name, getattr(one, name, None)) for one in declared for name in LIMITS]
    return Interval(**{name: limit for name, limit in limits if limit is not None})


def _allowed(annotation: Any) -> str:
    base = _base(annotation)
    if base in KINDS:
        return KINDS[base] + _range(interval(annotation))
    origin, args = typing.get_origin(base), typing.get_args(base)
    if origin is Literal:
        names = ", ".join(str(arg) for arg in args)
        return f"one of {names}" if len(args) > 1 else names
    if origin is tuple and args[-1:] == (Ellipsis,):
        return f"a list, each {allowed(args[0])}" + _distinct(annotation)
    if origin is tuple:
        return f"a list of {len(args)}, each {allowed(args[0])}"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return f"a mapping of names to {allowed(args[1])}"
    return "a section"


def _keys(section: Any) -> str:
    """A section beside which something else is allowed, for example "{low, high, log}"."""
    return "{" + ", ".join(field.name for field in fields(section)) + "}"


def _distinct(annotation: Any) -> str:
    found = [extra for extra in getattr(annotation, "__metadata__", ()) if isinstance(extra, Distinct)]
    least = found[0].least if found else 0
    return (", none twice" if found else "") + (f", at least {least}" if least else "")


def _range(limits: Interval) -> str:
    low, high = (None if limit is None else _number(limit) for limit in (_low(limits), _high(limits)))
    above, below = limits.gt is not None, limits.lt is not None
    if low is not None and high is not None and not above and not below:
        return f" from {low} to {high}"
    parts = [f"{'above' if above else 'of at least'} {low}"] * (low is not None)
    parts += [f"{'below' if below else 'at most'} {high}"] * (high is not None)
    return " " + " and ".join(parts) if parts else ""


def _low(limits: Interval) -> Any:
    return limits.ge if limits.ge is not None else limits.gt


def _high(limits: Interval) -> Any:
    return limits.le if limits.le is not None else limits.lt


def _number(value: Any) -> str:
    """Large powers of ten are easier to read as 10^9."""
    text = str(value)
    zeros = len(text) - 1
    return f"10^{zeros}" if zeros >= 6 and text == "1" + "0" * zeros else f"{value:g}" if value < 10**6 else text


def _base(annotation: Any) -> Any:
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation


def _without_discriminator(annotation: Any) -> Any:
    """A union inside ``Annotated`` is still a union."""
    base = _base(annotation)
    return base if len(union(base)) > 1 else annotation
