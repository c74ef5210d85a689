"""YAML text to plain dicts and back, with the scalars of YAML 1.2 and the line of every key.

PyYAML follows YAML 1.1, where ``1e-4`` is text, ``on`` is true, ``1:30`` is 90 and a repeated key silently wins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from sims.errors import reason

Tree = dict[str, Any]


class YamlError(ValueError):
    """Text that is not YAML, or YAML that is not a mapping with distinct keys."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a key was written; ``line`` counts from 1 and is None for the command line."""

    file: str
    line: int | None


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str | None, list] = {}  # noqa: RUF012 - PyYAML's own class attribute


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers: dict[str | None, list] = {}  # noqa: RUF012

    def ignore_aliases(self, data: Any) -> bool:
        return True


SCALARS = {
    "null": (r"~|null|Null|NULL|", "~nN\0"),
    "bool": (r"true|True|TRUE|false|False|FALSE", "tTfF"),
    "int": (r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+", "-+0123456789"),
    "float": (
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf)|\.(nan|NaN)",
        "-+.0123456789",
    ),
}
for _tag, (_pattern, _first) in SCALARS.items():
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), [c.strip("\0") for c in _first]
        )


def _construct_float(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> float:
    text = node.value.replace("_", "").lower()
    return float(text.replace(".inf", "inf").replace(".nan", "nan"))


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 16) if text.startswith("0x") else int(text)


_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Loader.add_constructor("tag:yaml.org,2002:float", _construct_float)


def read_tree(path: Path) -> tuple[Tree, dict[tuple[str, ...], Origin]]:
    """The mapping in ``path`` and where each of its keys was written. Raises YamlError, one line that does not name the
    file."""
    origins: dict[tuple[str, ...], Origin] = {}

    def record(keys: tuple[str, ...], line: int) -> None:
        origins[keys] = Origin(file=path.name, line=line)

    try:
        tree = _parse(path.read_text(encoding="utf-8"), record)
    except (OSError, UnicodeDecodeError) as error:
        raise YamlError(f"cannot be read as YAML: {reason(error)}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise YamlError(f"expected sections of 'key: value', got a {type(tree).__name__}")
    return tree, origins


def parse_scalar(text: str) -> Any:
    """A value as written on a command line. Raises YamlError."""
    return _parse(text, lambda keys, line: None)


def dump_tree(tree: Tree) -> str:
    """YAML text that ``read_tree`` reads back to an equal tree."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def _parse(text: str, record: Any) -> Any:
    try:
        loader = _Loader(text)
    except yaml.YAMLError as error:
        raise YamlError(f"not valid YAML: {' '.join(str(error).split())}") from None
    try:
        root = loader.get_single_node()
        return None if root is None else _convert(loader, root, (), record)
    except yaml.MarkedYAMLError as error:
        line = f" (line {error.problem_mark.line + 1})" if error.problem_mark else ""
        raise YamlError(f"not valid YAML: {error.problem}{line}") from None
    except yaml.YAMLError as error:
        raise YamlError(f"not valid YAML: {' '.join(str(error).split())}") from None
    finally:
        loader.dispose()


def _convert(loader: _Loader, node: yaml.Node, keys: tuple[str, ...], record: Any) -> Any:
    if isinstance(node, yaml.MappingNode):
        out: Tree = {}
        for key_node, value_node in node.value:
            key, line = str(key_node.value), key_node.start_mark.line + 1
            if key in out:
                raise YamlError(f"key '{'.'.join((*keys, key))}' is given twice (line {line})")
            record((*keys, key), line)
            out[key] = _convert(loader, value_node, (*keys, key), record)
        return out
    if isinstance(node, yaml.SequenceNode):
        return [_convert(loader, item, (*keys, str(index)), record) for index, item in enumerate(node.value)]
    return loader.construct_object(node)
