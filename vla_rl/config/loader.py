"""YAML and command line to one frozen dataclass; every mistake is a line that says what to change.

* The dataclasses are the schema (vla_rl/config/schema.py). They are frozen and keyword-only, nested as sections.
* ``extends: other.yaml`` starts from another file (relative to this one), ``extends: quickstart`` from a packaged one.
  Sections merge key by key; lists, mappings and other values are replaced. A section whose ``name`` differs is
  replaced too, except for the settings that both kinds inherit from one class (``algorithm.iterations``). Overrides
  ``--section.key value`` merge alike in any order: a section, or its name, before what is in it.
* A section given in part keeps the rest of the default that the section around it gives it, which may be others than
  its class's (``distillation.fit`` of ``BCConfig``).
* A relative path is relative to the file that names it, on the command line to the working directory.
* Types are strict: "3" is no integer. Scalars follow YAML 1.2, so ``1e-4`` is a number and ``on`` is text.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError

from episodes.files import write_atomically
from sims.config.yaml_tree import Origin, Tree, YamlError, dump_tree, read_tree
from vla_rl.config.errors import ConfigError, Keys, describe, show
from vla_rl.config.merge import Report, absolute, ignore, merge, override
from vla_rl.config.overrides import check_sections, parse_overrides
from vla_rl.config.packaged import find_packaged
from vla_rl.config.schema import config_fields, default, hints, sections, settings_other_than_its_class, variants

T = TypeVar("T")


def load_config(cls: type[T], path: str | Path, overrides: Sequence[str] = (), *, report: Report = ignore) -> T:
    """``path`` with ``overrides`` applied, as a ``cls``.

    overrides: command-line tokens, ``--a.b value`` or ``--a.b=value``; values are YAML. ``report`` gets a line for each
    section of the file that an override replaced.  Raises ConfigError that lists every mistake found, one per line.
    """
    section: type = cls
    path, adapter = Path(path), _adapter(section)
    tree, origins = _read_extended(cls, path, seen=())
    if not tree:
        sections = ", ".join(dict.fromkeys(field.path.partition(".")[0] for field in config_fields(cls)))
        raise ConfigError(f"{path.name} is empty; it needs at least one of: {sections}")
    tree = _with_default_names(cls, tree)
    for keys, value in sorted(parse_overrides(overrides), key=lambda pair: _depth(pair[0])):
        check_sections(tree, keys)
        tree = override(cls, tree, keys, absolute(cls, value, Path.cwd(), keys), report)
        origins[keys] = Origin(file=path.name, line=None)
    tree = _with_owners_defaults(cls, _with_default_names(cls, tree))
    try:
        return adapter.validate_json(json.dumps([tree]))[0]
    except ValidationError as error:
        raise ConfigError("\n".join(describe(cls, error, origins, path.name))) from None


def _depth(keys: Keys) -> int:
    """Of the section that an override sets or chooses by name, or of the setting."""
    return len(keys) - (keys[-1] == "name")


def save_config(config: Any, path: str | Path) -> None:
    """Write every field, defaults included, as YAML that ``load_config`` reads back to an equal value; atomically.

    Paths inside the file's own folder are written relative to it, so that the folder can be moved.
    """
    folder = Path(os.path.abspath(path)).parent
    write_atomically(Path(path), dump_tree(_plain_tree(config, folder)).encode())


def flat_settings(config: Any) -> dict[str, Any]:
    """Every leaf as it would be saved, by its dotted path."""

    def leaves(node: Any, keys: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if not isinstance(node, dict) or not node:
            yield ".".join(keys), node
            return
        for key, inner in node.items():
            yield from leaves(inner, (*keys, key))

    return dict(leaves(_plain_tree(config, Path()), ()))


@cache
def _adapter(cls: type) -> TypeAdapter:
    for field in config_fields(cls):
        if len(sections(field.annotation)) > 1:
            raise TypeError(f"{cls.__name__}: section {field.path!r} needs Field(discriminator='name')")
    # A dataclass ignores the adapter's settings, a list passes them down to every level.
    # JSON input lets strict mode build dataclasses from mappings and tuples from lists, and nothing looser.
    return TypeAdapter(list[cls], config=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False))


def _plain_tree(value: Any, folder: Path) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain_tree(getattr(value, field.name), folder) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain_tree(item, folder) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain_tree(item, folder) for item in value]
    if isinstance(value, Path):
        whole = Path(os.path.abspath(value))
        return str(whole.relative_to(folder) if whole.is_relative_to(folder) else whole)
    return value


# -- files ----------------------------------------------------------------------------------------------------------


def _read_extended(cls: type, path: Path, *, seen: tuple[Path, ...]) -> tuple[Tree, dict[Keys, Origin]]:
    if not path.is_file():
        raise ConfigError(_no_such_file(path))
    if path.resolve() in seen:
        raise ConfigError(f"{path.name}: 'extends' is circular: {' -> '.join(p.name for p in (*seen, path))}")
    try:
        tree, origins = read_tree(path)
    except YamlError as error:
        raise ConfigError(f"{path.name}: {error}") from None
    parent = tree.pop("extends", None)
    tree = absolute(cls, tree, path.parent)
    if parent is None:
        return tree, origins
    if not isinstance(parent, str):
        raise ConfigError(f"{path.name}: 'extends' must be the path of a YAML file, got {show(parent)}")
    beside = path.parent / parent
    above = beside if beside.is_file() else find_packaged(Path(parent))
    if above is None:
        raise ConfigError(f"{path.name}: 'extends': {_no_such_file(beside)}")
    base, base_origins = _read_extended(cls, above, seen=(*seen, path.resolve()))
    return merge(cls, _with_default_names(cls, base), tree), base_origins | origins


def _no_such_file(path: Path) -> str:
    if path.is_dir():
        return f"{path} is a folder; name a YAML file"
    siblings = [p.name for p in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, siblings, n=1)
    return f"{path}: no such file" + (f"; did you mean '{path.with_name(near[0])}'?" if near else "")


def _with_default_names(cls: type, tree: Any) -> Any:
    """``name`` may be left out of a section for which the dataclass has a default."""
    if not isinstance(tree, dict):
        return tree
    out = dict(tree)
    for field, node in _given_sections(cls, tree):
        if "name" not in node and (section := default(field)) is not None and hasattr(section, "name"):
            node = {"name": section.name} | node
        chosen = _variant(cls, field, node)
        out[field.name] = _with_default_names(chosen, node) if chosen else node
    return out


def _with_owners_defaults(cls: type, tree: Any) -> Any:
    """Settings that are left out of a section and that its default in ``cls`` gives other values than its own class."""
    if not isinstance(tree, dict):
        return tree
    out = dict(tree)
    for field, node in _given_sections(cls, tree):
        chosen, section = _variant(cls, field, node), default(field)
        if chosen is None:
            continue
        if type(section) is chosen:
            other = settings_other_than_its_class(section)
            node = merge(chosen, {name: _plain_tree(value, Path()) for name, value in other.items()}, node)
        out[field.name] = _with_owners_defaults(chosen, node)
    return out


def _given_sections(cls: type, tree: Tree) -> Iterator[tuple[dataclasses.Field, Tree]]:
    """The fields of ``cls`` that are sections, where the tree gives them as mappings."""
    for field in dataclasses.fields(cls):
        if isinstance(node := tree.get(field.name), dict) and variants(hints(cls)[field.name]):
            yield field, node


def _variant(cls: type, field: dataclasses.Field, node: Tree) -> type | None:
    """The dataclass that a section names; None where it names none, and there are several."""
    members = variants(hints(cls)[field.name])
    return members.get(node.get("name")) or (next(iter(members.values())) if len(members) == 1 else None)
