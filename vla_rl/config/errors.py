"""Validation errors as messages: one line per mistake, with file, path, allowed values and the nearest match."""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from sims.config.yaml_tree import Origin
from sims.errors import UserError
from vla_rl.config.allowed import allowed, choices
from vla_rl.config.schema import config_fields, hints, plain, union, variants

Keys = tuple[str, ...]


class ConfigError(UserError):
    """One line per mistake."""


def describe(cls: type, error: ValidationError, origins: Mapping[Keys, Origin], file: str) -> list[str]:
    """The messages of ``error``; ``origins``: where each key was written; ``file``: for keys that were not written."""
    lines = _messages(cls, error).items()
    return [f"{_origin(origins, keys, file).file}: {line}{_where(origins, keys, file)}" for keys, line in lines]


def show(value: Any) -> str:
    """A wrong value as a message names it."""
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a section"
        case list() if len(repr(value)) > 40:
            return "a list"
    return repr(value)


def _messages(cls: type, error: ValidationError) -> dict[Keys, str]:
    """One per path."""
    lines: dict[Keys, str] = {}
    for detail in error.errors(include_url=False):
        if detail["type"] == "unexpected_keyword_argument":
            keys, owner, _ = _locate(cls, detail["loc"][1:])
            lines[keys] = f"unknown key '{'.'.join(keys)}'{_nearest_key(keys, owner, cls)}"
            continue
        short = detail["type"] == "missing" and isinstance(detail["loc"][-1], int)  # a list that should be longer
        keys, _, annotation = _locate(cls, detail["loc"][1 : -1 if short else None])
        if detail["type"] == "missing" and not short:
            lines[keys] = f"'{'.'.join(keys)}' is required: {allowed(annotation)}"
        else:
            lines[keys] = _message(detail, keys, annotation)
    return lines


def _locate(cls: type, loc: Sequence[int | str]) -> tuple[Keys, type | None, Any]:
    """The keys of a pydantic location, in which names of variants are no keys, the dataclass around the last, and the
    annotation there."""
    keys: list[str] = []
    owner: type | None = None
    annotation: Any = cls
    for part in loc:
        members = variants(annotation)
        if len(members) > 1 and part in members:
            annotation = members[part]
            continue
        if not members and len(union(plain(annotation))) > 1:
            break  # the member of a plain union
        keys.append(str(part))
        owner = next(iter(members.values())) if len(members) == 1 else None
        if owner is not None:
            annotation = hints(owner).get(str(part), Any)
        else:
            inner = [arg for arg in typing.get_args(plain(annotation)) if arg is not Ellipsis]
            annotation = inner[min(part, len(inner) - 1) if isinstance(part, int) else -1] if inner else Any
    return tuple(keys), owner, annotation


def _message(detail: ErrorDetails, keys: Keys, annotation: Any) -> str:
    dotted, got = ".".join(keys), detail["input"]
    match detail["type"]:
        case "value_error" | "assertion_error":
            return f"'{dotted}': {detail['ctx']['error']}" if keys else str(detail["ctx"]["error"])
        case "union_tag_invalid":
            name, expected = detail["ctx"]["tag"], detail["ctx"]["expected_tags"].replace("'", "")
            hint = _nearest(name, expected.split(", ")) or "; one of another package is known once that is installed"
            return f"'{dotted}.name' must be one of {expected}, got '{name}'{hint}"
        case "union_tag_not_found":
            return f"'{dotted}.name' is required: it selects the variant of the section"
    words = "a section" if variants(annotation) else allowed(annotation)
    hint = _nearest(got, choices(annotation)) if isinstance(got, str) else ""
    if isinstance(got, str) and words.startswith("a list, each text"):
        hint = f"; write [{got}]"
    return f"'{dotted}' must be {words}, got {show(got)}{hint}"


# -- unknown keys ---------------------------------------------------------------------------------------------------


def _nearest_key(keys: Keys, owner: type | None, cls: type) -> str:
    names = [field.name for field in dataclasses.fields(owner)] if owner is not None else []
    if near := _nearest(keys[-1], names):
        return near
    elsewhere = [field.path for field in config_fields(cls) if field.name == keys[-1]]
    if elsewhere and ".".join(keys) not in elsewhere:  # a setting of another choice for this section
        return f"; did you mean '{max(elsewhere, key=lambda path: _shared(keys, path.split('.')))}'?"
    return f"; allowed here: {', '.join(sorted(names))}"


def _shared(keys: Sequence[str], others: Sequence[str]) -> int:
    """How many of the first keys are the same."""
    return next((i for i, (one, other) in enumerate(zip(keys, others, strict=False)) if one != other), len(keys))


def _nearest(got: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(got, allowed, n=1, cutoff=0.7) or [
        name for name in allowed if name.startswith(got)
    ]
    return f"; did you mean '{near[0]}'?" if near else ""


# -- where a key was written ----------------------------------------------------------------------------------------


def _origin(origins: Mapping[Keys, Origin], keys: Keys, file: str) -> Origin:
    """Of the key, or else of a key inside it (an override names only those), or of the nearest section around it."""
    inside = [written for written in origins if written[: len(keys)] == keys]
    if keys and inside:
        return origins[min(inside, key=len)]
    for depth in range(len(keys) - 1, 0, -1):
        if keys[:depth] in origins:
            return origins[keys[:depth]]
    return Origin(file=file, line=0)


def _where(origins: Mapping[Keys, Origin], keys: Keys, file: str) -> str:
    line = _origin(origins, keys, file).line
    if not line:
        return " (command line)" if line is None else ""
    inside = [origin for written, origin in origins.items() if written[: len(keys)] == keys]
    overridden = keys and any(origin.line is None for origin in inside)
    return f" (line {line} and command line)" if overridden else f" (line {line})"
