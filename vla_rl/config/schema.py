"""The dataclasses of a configuration as a schema: fields, sections, and the variants of a section.

A section with several variants is ``Annotated[PPO | GRPO, Field(discriminator="name")]`` with ``name: Literal[...]`` in
every member; the union may be built at run time from a registry.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One leaf of a configuration: its dotted path and the dataclass that declares it."""

    path: str
    owner: type
    name: str
    annotation: Any


def config_fields(cls: type, prefix: str = "") -> Iterator[ConfigField]:
    """Every leaf of ``cls``, in order, those of all variants of a section included."""
    for field in dataclasses.fields(cls):
        annotation = hints(cls)[field.name]
        members = variants(annotation)
        if not members:
            yield ConfigField(path=prefix + field.name, owner=cls, name=field.name, annotation=annotation)
        for member in members.values():
            yield from config_fields(member, f"{prefix}{field.name}.")


@cache
def hints(cls: type) -> dict[str, Any]:
    """The resolved annotations of a dataclass, ``Annotated`` kept."""
    return typing.get_type_hints(cls, include_extras=True)


def default(field: dataclasses.Field) -> Any:
    """A field's default value; None if it has none."""
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def settings_other_than_its_class(section: Any) -> dict[str, Any]:
    """The fields of a dataclass instance whose values are not the class's defaults."""
    values = {field: getattr(section, field.name) for field in dataclasses.fields(section)}
    return {field.name: value for field, value in values.items() if value != default(field)}


def variants(annotation: Any) -> dict[Any, type]:
    """The dataclasses that a section may be, by ``name``; one without a name is listed under its class name.

    Empty for a leaf, for a union of dataclasses without a discriminator, and where something else is allowed too.
    """
    found = sections(annotation)
    members = [member for member in union(plain(annotation)) if member is not type(None)]
    if len(found) < len(members) or (len(found) > 1 and not _has_discriminator(annotation)):
        return {}
    return {name: section for section in found for name in _names(section)}


def sections(annotation: Any) -> list[type]:
    """The dataclasses among the members of a union, or the annotation itself if it is one."""
    return [arg for arg in union(plain(annotation)) if dataclasses.is_dataclass(arg) and isinstance(arg, type)]


def plain(annotation: Any) -> Any:
    """Without ``Annotated`` and without ``| None``."""
    while True:
        if typing.get_origin(annotation) is Annotated:
            annotation = typing.get_args(annotation)[0]
            continue
        args = union(annotation)
        some = [arg for arg in args if arg is not type(None)]
        if len(some) != 1 or len(args) == 1:
            return annotation
        annotation = some[0]


def union(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; anything else alone."""
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _has_discriminator(annotation: Any) -> bool:
    if typing.get_origin(annotation) is Annotated:
        base, *extras = typing.get_args(annotation)
        return any(getattr(extra, "discriminator", None) == "name" for extra in extras) or _has_discriminator(base)
    return any(_has_discriminator(arg) for arg in union(annotation) if arg is not annotation)


def _names(section: type) -> tuple[Any, ...]:
    hint = hints(section).get("name")
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else (section.__name__,)
