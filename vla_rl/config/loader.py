"""YAML and command line to one frozen dataclass; every mistake is a line that says what to change.

* The dataclasses are the schema. They are plain, frozen and keyword-only, nested as sections. A section that comes in
  kinds is ``Annotated[PPO | GRPO, Field(discriminator="name")]`` with ``name: Literal[...]`` in every member.
* ``extends: other.yaml`` starts from another file (relative to this one). Sections merge key by key; a section whose
  ``name`` differs is replaced as a whole. Overrides ``--section.key value`` merge the same way, names first.
* Types are strict: "3" is no integer. Scalars follow YAML 1.2, so ``1e-4`` is a number and ``on`` is text.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from sims.errors import UserError
from vla_rl.config.yaml_tree import Origin, Tree, YamlError, dump_tree, parse_scalar, read_tree

T = TypeVar("T")
Keys = tuple[str, ...]


class ConfigError(UserError):
    """One line per mistake."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigField:
    """One leaf of a configuration: its dotted path and the dataclass that declares it."""

    path: str
    owner: type
    name: str
    annotation: Any


# ---------------------------------------------------------------------------------------------------------- loading


def load_config(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """``path`` with ``overrides`` applied, as a ``cls``.

    overrides: command-line tokens, ``--a.b value`` or ``--a.b=value``; values are YAML.  Raises ConfigError that lists
    every mistake found, one per line.
    """
    path = Path(path)
    tree, origins = _read_extended(path, seen=())
    pairs = _parse_overrides(overrides)
    for keys, value in sorted(pairs, key=lambda pair: pair[0][-1] != "name"):
        change: Any = value
        for key in reversed(keys):
            change = {key: change}
        _check_sections(tree, keys)
        tree = _merge(tree, change)
        origins[keys] = Origin(file=path.name, line=None)
    tree = _with_default_names(cls, tree)
    try:
        return _adapter(cls).validate_json(json.dumps([tree]))[0]
    except ValidationError as error:
        lines = _describe(cls, error, tree, origins, path.name)
        raise ConfigError("\n".join(lines)) from None


def _adapter(cls: type) -> TypeAdapter[Any]:
    for field in config_fields(cls):
        if len(_sections(field.annotation)) > 1:
            raise TypeError(f"{cls.__name__}: section {field.path!r} needs Field(discriminator='name')")
    # A dataclass of its own takes no outer settings, its container does, and it passes them down to every level.
    # JSON input lets strict mode build dataclasses from mappings and tuples from lists, and nothing looser.
    return TypeAdapter(list[cls], config=ConfigDict(extra="forbid", strict=True))


def _read_extended(path: Path, *, seen: tuple[Path, ...]) -> tuple[Tree, dict[Keys, Origin]]:
    if not path.is_file():
        raise ConfigError(_no_such_file(path))
    if path.resolve() in seen:
        raise ConfigError(f"{path.name}: 'extends' goes in a circle: {' -> '.join(p.name for p in (*seen, path))}")
    try:
        tree, origins = read_tree(path)
    except YamlError as error:
        raise ConfigError(str(error)) from None
    parent = tree.pop("extends", None)
    if parent is None:
        return tree, origins
    if not isinstance(parent, str):
        raise ConfigError(f"{path.name}: 'extends' must be the path of a YAML file, got {_show(parent)}")
    base, base_origins = _read_extended(path.parent / parent, seen=(*seen, path.resolve()))
    return _merge(base, tree), base_origins | origins


def _no_such_file(path: Path) -> str:
    siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"{path}: no such file" + (f"; did you mean '{path.with_name(near[0])}'?" if near else "")


def _merge(base: Any, change: Any) -> Any:
    """``change`` over ``base``, section by section; a section of another name replaces the whole."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    if "name" in change and "name" in base and change["name"] != base["name"]:
        return change
    return base | {key: _merge(base.get(key), value) for key, value in change.items()}


def _parse_overrides(tokens: Sequence[str]) -> list[tuple[Keys, Any]]:
    pairs = []
    rest = iter(tokens)
    for token in rest:
        if not token.startswith("--") or token == "--":
            raise ConfigError(f"command line: expected '--section.key value', got {token!r}")
        flag, equals, text = token.partition("=")
        if not equals:
            text = next(rest, "--")
            if text.startswith("--"):
                raise ConfigError(f"command line: {flag} needs a value")
        try:
            value = parse_scalar(text)
        except YamlError as error:
            raise ConfigError(f"command line: {flag}: {error}") from None
        pairs.append((tuple(flag[2:].replace("-", "_").split(".")), value))
    return pairs


def _check_sections(tree: Tree, keys: Keys) -> None:
    node: Any = tree
    for depth, key in enumerate(keys[:-1]):
        node = node.get(key)
        if node is None:
            return
        if not isinstance(node, dict):
            dotted = ".".join(keys[: depth + 1])
            raise ConfigError(f"command line: --{'.'.join(keys)}: '{dotted}' is {_show(node)}, not a section")


def _with_default_names(cls: type, tree: Any) -> Any:
    """A section that comes in kinds may leave out ``name`` where the dataclass has a default for the section."""
    if not isinstance(tree, dict):
        return tree
    out = dict(tree)
    for field in dataclasses.fields(cls):
        members = _members(_hints(cls)[field.name])
        node = out.get(field.name)
        if not members or not isinstance(node, dict):
            continue
        if "name" not in node and (default := _default(field)) is not None and hasattr(default, "name"):
            node = {"name": default.name} | node
        chosen = members.get(node.get("name")) or (next(iter(members.values())) if len(members) == 1 else None)
        out[field.name] = _with_default_names(chosen, node) if chosen else node
    return out


def _default(field: dataclasses.Field) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


# ---------------------------------------------------------------------------------------------- walking the schema


def config_fields(cls: type, prefix: str = "") -> Iterator[ConfigField]:
    """Every leaf of ``cls``, in order; each member of a section that comes in kinds is walked."""
    for field in dataclasses.fields(cls):
        annotation = _hints(cls)[field.name]
        members = _members(annotation)
        if not members:
            yield ConfigField(path=prefix + field.name, owner=cls, name=field.name, annotation=annotation)
        for member in members.values():
            yield from config_fields(member, f"{prefix}{field.name}.")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls, include_extras=True)


def _plain(annotation: Any) -> Any:
    """Without Annotated and without ``| None``."""
    while True:
        if typing.get_origin(annotation) is Annotated:
            annotation = typing.get_args(annotation)[0]
            continue
        args = _union(annotation)
        some = [arg for arg in args if arg is not type(None)]
        if len(some) != 1 or len(args) == 1:
            return annotation
        annotation = some[0]


def _union(annotation: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if is_union else (annotation,)


def _sections(annotation: Any) -> list[type]:
    return [arg for arg in _union(_plain(annotation)) if dataclasses.is_dataclass(arg) and isinstance(arg, type)]


def _members(annotation: Any) -> dict[Any, type]:
    """The dataclasses a section may be, by their ``name``; one without a name is listed under its class name."""
    sections = _sections(annotation)
    if len(sections) > 1 and not _is_tagged(annotation):
        return {}
    return {tag: section for section in sections for tag in _tags(section)}


def _is_tagged(annotation: Any) -> bool:
    if typing.get_origin(annotation) is Annotated:
        base, *extras = typing.get_args(annotation)
        return any(getattr(extra, "discriminator", None) == "name" for extra in extras) or _is_tagged(base)
    return any(_is_tagged(arg) for arg in _union(annotation) if arg is not annotation)


def _tags(section: type) -> tuple[Any, ...]:
    hint = _hints(section).get("name")
    return typing.get_args(hint) if typing.get_origin(hint) is Literal else (section.__name__,)


# ------------------------------------------------------------------------------------------------ describing errors

EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "dict_type": "a section",
    "dataclass_type": "a section",
    "tuple_type": "a list",
    "list_type": "a list",
    "path_type": "a path",
}


def _describe(cls: type, error: ValidationError, tree: Tree, origins: Mapping[Keys, Origin], file: str) -> list[str]:
    """One line per mistaken path; the alternatives of a plain union (``int | None``) are joined by "or"."""
    wrong: dict[Keys, list[str]] = {}
    lines: dict[Keys, str] = {}
    for detail in error.errors(include_url=False):
        keys, owner = _locate(cls, detail["loc"][1:])
        said = _sentence(detail, keys, owner, cls)
        if said.startswith("must be "):
            wrong.setdefault(keys, []).append(said.removeprefix("must be "))
            allowed, got = " or ".join(wrong[keys]), detail["input"]
            near = _nearest(got, re.findall(r"\w+", allowed)) if isinstance(got, str) else ""
            lines[keys] = f"'{'.'.join(keys)}' must be {allowed}, got {_show(got)}{near}"
        else:
            lines[keys] = said
    return [f"{_origin(origins, keys, file).file}: {line}{_where(origins, keys, file)}" for keys, line in lines.items()]


def _locate(cls: type, loc: Sequence[int | str]) -> tuple[Keys, type | None]:
    """The dotted keys of a pydantic location, whose union tags are no keys, and the dataclass around the last key."""
    keys: list[str] = []
    owner: type | None = None
    annotation: Any = cls
    for part in loc:
        members = _members(annotation)
        if len(members) > 1 and part in members:
            annotation = members[part]
            continue
        if not members and len(_union(_plain(annotation))) > 1:
            break  # the tag of a plain union
        keys.append(str(part))
        owner = next(iter(members.values())) if len(members) == 1 else None
        if owner is not None:
            annotation = _hints(owner).get(str(part), Any)
        else:
            inner = [arg for arg in typing.get_args(_plain(annotation)) if arg is not Ellipsis]
            annotation = inner[min(int(part), len(inner) - 1)] if inner and isinstance(part, int) else Any
    return tuple(keys), owner


def _sentence(detail: ErrorDetails, keys: Keys, owner: type | None, cls: type) -> str:
    dotted = ".".join(keys)
    match detail["type"]:
        case "unexpected_keyword_argument":
            return f"unknown key '{dotted}'{_nearest_key(keys, owner, cls)}"
        case "missing":
            return f"'{dotted}' is required"
        case "value_error" | "assertion_error":
            return f"'{dotted}': {detail['ctx']['error']}" if keys else str(detail["ctx"]["error"])
        case "literal_error" | "enum":
            allowed = detail["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
            return f"must be one of {allowed}" if "," in allowed else f"must be {allowed}"
        case "union_tag_invalid":
            tag, expected = detail["ctx"]["tag"], detail["ctx"]["expected_tags"].replace("'", "")
            return f"'{dotted}.name' must be one of {expected}, got '{tag}'{_nearest(tag, expected.split(', '))}"
        case "union_tag_not_found":
            return f"'{dotted}.name' is required: it picks the kind of section"
        case kind if kind in EXPECTED:
            return f"must be {EXPECTED[kind]}"
    return detail["msg"].replace("Input should be", "must be").replace("Input should have", "must be something with")


def _nearest(got: str, allowed: Sequence[str]) -> str:
    near = difflib.get_close_matches(got, allowed, n=1, cutoff=0.7) or [
        name for name in allowed if name.startswith(got)
    ]
    return f"; did you mean '{near[0]}'?" if near else ""


def _nearest_key(keys: Keys, owner: type | None, cls: type) -> str:
    names = [field.name for field in dataclasses.fields(owner)] if owner is not None else []
    if near := _nearest(keys[-1], names):
        return near
    elsewhere = [field.path for field in config_fields(cls) if field.name == keys[-1]]
    if elsewhere:
        return f"; did you mean '{elsewhere[0]}'?"
    return f"; allowed here: {', '.join(sorted(names))}"


def _origin(origins: Mapping[Keys, Origin], keys: Keys, file: str) -> Origin:
    """Where the key, or else the nearest section around it, was written."""
    for depth in range(len(keys), 0, -1):
        if keys[:depth] in origins:
            return origins[keys[:depth]]
    return Origin(file=file, line=0)


def _where(origins: Mapping[Keys, Origin], keys: Keys, file: str) -> str:
    line = _origin(origins, keys, file).line
    return " (command line)" if line is None else f" (line {line})" if line else ""


def _show(value: Any) -> str:
    match value:
        case None:
            return "nothing"
        case bool():
            return str(value).lower()
        case dict():
            return "a section"
        case list():
            return "a list"
    return repr(value)


# ----------------------------------------------------------------------------------------------------------- saving


def save_config(config: Any, path: str | Path) -> None:
    """Write every field, defaults included, as YAML that ``load_config`` reads back to an equal value."""
    Path(path).write_text(dump_tree(_plain_tree(config)), encoding="utf-8")


def _plain_tree(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_tree(item) for item in value]
    return str(value) if isinstance(value, Path) else value
