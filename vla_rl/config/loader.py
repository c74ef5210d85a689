"""YAML and command line to one frozen dataclass; every mistake is a line that says what to change.

* The dataclasses are the schema (vla_rl/config/schema.py). They are frozen and keyword-only, nested as sections.
* ``extends: other.yaml`` starts from another file (relative to this one). Sections merge key by key; a section whose
  ``name`` differs is replaced as a whole. Overrides ``--section.key value`` merge the same way, names first.
* Types are strict: "3" is no integer. Scalars follow YAML 1.2, so ``1e-4`` is a number and ``on`` is text.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from vla_rl.config.errors import ConfigError, Keys, describe, show
from vla_rl.config.overrides import check_sections, parse_overrides
from vla_rl.config.schema import config_fields, default, hints, sections, variants
from vla_rl.config.yaml_tree import Origin, Tree, YamlError, dump_tree, read_tree

T = TypeVar("T")


def load_config(cls: type[T], path: str | Path, overrides: Sequence[str] = ()) -> T:
    """``path`` with ``overrides`` applied, as a ``cls``.

    overrides: command-line tokens, ``--a.b value`` or ``--a.b=value``; values are YAML.  Raises ConfigError that lists
    every mistake found, one per line.
    """
    path = Path(path)
    tree, origins = _read_extended(path, seen=())
    pairs = parse_overrides(overrides)
    for keys, value in sorted(pairs, key=lambda pair: pair[0][-1] != "name"):
        change: Any = value
        for key in reversed(keys):
            change = {key: change}
        check_sections(tree, keys)
        tree = _merge(tree, change)
        origins[keys] = Origin(file=path.name, line=None)
    tree = _with_default_names(cls, tree)
    try:
        return _adapter(cls).validate_json(json.dumps([tree]))[0]
    except ValidationError as error:
        raise ConfigError("\n".join(describe(cls, error, origins, path.name))) from None


def save_config(config: Any, path: str | Path) -> None:
    """Write every field, defaults included, as YAML that ``load_config`` reads back to an equal value."""
    Path(path).write_text(dump_tree(_plain_tree(config)), encoding="utf-8")


def _adapter(cls: type) -> TypeAdapter:
    for field in config_fields(cls):
        if len(sections(field.annotation)) > 1:
            raise TypeError(f"{cls.__name__}: section {field.path!r} needs Field(discriminator='name')")
    # A dataclass ignores the adapter's settings, a list passes them down to every level.
    # JSON input lets strict mode build dataclasses from mappings and tuples from lists, and nothing looser.
    return TypeAdapter(list[cls], config=ConfigDict(extra="forbid", strict=True))


def _plain_tree(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain_tree(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain_tree(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_tree(item) for item in value]
    return str(value) if isinstance(value, Path) else value


# -- files ----------------------------------------------------------------------------------------------------------


def _read_extended(path: Path, *, seen: tuple[Path, ...]) -> tuple[Tree, dict[Keys, Origin]]:
    if not path.is_file():
        raise ConfigError(_no_such_file(path))
    if path.resolve() in seen:
        raise ConfigError(f"{path.name}: 'extends' is circular: {' -> '.join(p.name for p in (*seen, path))}")
    try:
        tree, origins = read_tree(path)
    except YamlError as error:
        raise ConfigError(str(error)) from None
    parent = tree.pop("extends", None)
    if parent is None:
        return tree, origins
    if not isinstance(parent, str):
        raise ConfigError(f"{path.name}: 'extends' must be the path of a YAML file, got {show(parent)}")
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


def _with_default_names(cls: type, tree: Any) -> Any:
    """``name`` may be left out of a section for which the dataclass has a default."""
    if not isinstance(tree, dict):
        return tree
    out = dict(tree)
    for field in dataclasses.fields(cls):
        members = variants(hints(cls)[field.name])
        node = out.get(field.name)
        if not members or not isinstance(node, dict):
            continue
        if "name" not in node and (section := default(field)) is not None and hasattr(section, "name"):
            node = {"name": section.name} | node
        chosen = members.get(node.get("name")) or (next(iter(members.values())) if len(members) == 1 else None)
        out[field.name] = _with_default_names(chosen, node) if chosen else node
    return out
