"""One configuration tree over another, as the schema says: sections merge, values are replaced, paths are resolved."""

from __future__ import annotations

import dataclasses
import os
import typing
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Literal

from vla_rl.config.errors import Keys
from vla_rl.config.schema import config_fields, hints, variants

Report = Callable[[str], None]


def ignore(line: str) -> None:
    """The report that nobody reads."""


def merge(cls: type, base: Any, change: Any, keys: Keys = (), report: Report = ignore) -> Any:
    """``change`` over ``base``, both at ``keys`` of a ``cls``."""
    if not isinstance(base, dict) or not isinstance(change, dict) or ".".join(keys) in _leaves(cls):
        return change
    if "name" in change and "name" in base and change["name"] != base["name"]:
        shared = _shared_settings(cls, keys, base["name"], change["name"])
        if dropped := sorted(set(base) - shared - {"name"}):
            section = ".".join(keys)
            report(
                f"{section}: {change['name']} replaces {base['name']}, whose settings are dropped: {', '.join(dropped)}"
            )
        base = {key: value for key, value in base.items() if key in shared}
    return base | {key: merge(cls, base.get(key), value, (*keys, key), report) for key, value in change.items()}


def override(cls: type, tree: Any, keys: Keys, value: Any, report: Report, at: Keys = ()) -> Any:
    """``tree`` with ``value`` at ``keys`` of a ``cls``; ``at``: where the tree itself is."""
    if keys == ("name",):
        return merge(cls, tree, {"name": value}, at, report)
    if not keys:
        return merge(cls, tree, value, at, report)
    node = tree if isinstance(tree, dict) else {}
    return node | {keys[0]: override(cls, node.get(keys[0]), keys[1:], value, report, (*at, keys[0]))}


def absolute(cls: type, value: Any, folder: Path, keys: Keys = ()) -> Any:
    """``value`` at ``keys`` of a ``cls``, its relative paths resolved against ``folder``."""
    annotation = _leaves(cls).get(".".join(keys))
    if annotation is None:
        if not isinstance(value, dict):
            return value
        return {key: absolute(cls, item, folder, (*keys, str(key))) for key, item in value.items()}
    members = list(_members(annotation))
    if Path not in members:
        return value
    if isinstance(value, list):
        return [_absolute(item, folder, members) for item in value]
    return _absolute(value, folder, members)


def _members(annotation: Any) -> Iterator[Any]:
    """The annotation and everything inside it."""
    yield annotation
    for inner in typing.get_args(annotation):
        yield from _members(inner)


def _absolute(value: Any, folder: Path, members: list[Any]) -> Any:
    names = [name for member in members if typing.get_origin(member) is Literal for name in typing.get_args(member)]
    return (
        os.path.abspath(folder / Path(value).expanduser()) if isinstance(value, str) and value not in names else value
    )


@cache
def _leaves(cls: type) -> dict[str, Any]:
    """Annotation by dotted path."""
    return {field.path: field.annotation for field in config_fields(cls)}


def _shared_settings(cls: type, keys: Keys, *names: str) -> set[str]:
    """What the kinds of this section inherit from one dataclass; nothing for a name that does not exist."""
    members = _variants_at(cls, keys)
    chosen = [members.get(name) for name in names]
    if None in chosen:
        return set()
    bases = set.intersection(*(set(kind.__mro__) for kind in chosen if kind is not None))
    return {field.name for base in bases if dataclasses.is_dataclass(base) for field in dataclasses.fields(base)}


def _variants_at(cls: type, keys: Keys) -> dict[Any, type]:
    members: dict[Any, type] = {cls.__name__: cls}
    for key in keys:
        annotation = next((hints(member)[key] for member in members.values() if key in hints(member)), None)
        members = variants(annotation)
    return members
