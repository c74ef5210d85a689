"""Settings on the command line: ``--section.key value``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sims.config.yaml_tree import Tree, YamlError, parse_scalar
from vla_rl.config.errors import ConfigError, Keys, show


def parse_overrides(tokens: Sequence[str]) -> list[tuple[Keys, Any]]:
    """(keys, value) of each ``--a.b value`` or ``--a.b=value``; values are YAML. Raises ConfigError."""
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


def check_sections(tree: Tree, keys: Keys) -> None:
    """Raises ConfigError where an override goes through something that is not a section."""
    node: Any = tree
    for depth, key in enumerate(keys[:-1]):
        node = node.get(key)
        if node is None:
            return
        if not isinstance(node, dict):
            dotted = ".".join(keys[: depth + 1])
            raise ConfigError(f"command line: --{'.'.join(keys)}: '{dotted}' is {show(node)}, not a section")
