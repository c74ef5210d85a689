"""Settings that nothing reads: found by looking for ``.field`` in the source of the packages."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path

from vla_rl.config.schema import config_fields


def unread_fields(config: type, folders: Iterable[Path]) -> list[str]:
    """Dotted paths of the leaves of ``config`` that no Python file under ``folders`` reads.

    A read is an attribute ``.field`` or a keyword of a class pattern, outside the class that declares the field or in
    one of its methods: what its own ``__post_init__`` and properties look at drives nothing. Two fields of one name
    share their reads, so this can miss an unread setting and never accuses a read one.
    """
    files = [path for folder in folders for path in folder.rglob("*.py")]
    reads = [read for path in files for read in _reads(ast.parse(path.read_text(encoding="utf-8")), inside=())]
    return sorted(
        {
            field.path
            for field in config_fields(config)
            if field.name != "name"  # picks the kind of section; the configuration loader reads it
            and not any(name == field.name and field.owner.__name__ not in inside for name, inside in reads)
        }
    )


def _reads(node: ast.AST, *, inside: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """(attribute, the classes around it) of every read under ``node``; a method counts as outside of its class."""
    if isinstance(node, ast.ClassDef):
        inside = (*inside, node.name)
    if isinstance(node, ast.FunctionDef) and node.name != "__post_init__" and not node.decorator_list:
        inside = inside[:-1]
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        yield node.attr, inside
    if isinstance(node, ast.MatchClass):
        yield from ((name, inside) for name in node.kwd_attrs)
    for child in ast.iter_child_nodes(node):
        yield from _reads(child, inside=inside)
