"""Measurements of the source itself: sizes of functions and files, loose modules, and the graph of imports.

tests/test_structure.py asserts the limits.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
LAYERS = (("sims",), ("episodes",), ("policies",), ("world_models", "real_robot"), ("vla_rl",))  # lowest first
PACKAGES = tuple(package for layer in LAYERS for package in layer)
LEVEL = {package: level for level, layer in enumerate(LAYERS) for package in layer}
Graph = Mapping[str, set[str]]


@dataclass(frozen=True, kw_only=True)
class Function:
    """``lines``: from ``def`` to the end, with the docstring and nested functions, without decorators."""

    name: str
    lines: int


# -- sizes ----------------------------------------------------------------------------------------------------------


@cache
def modules() -> dict[str, Path]:
    """Every module of the packages by dotted name; a package's ``__init__`` has the package's name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions() -> list[Function]:
    """Every function and method of the packages."""
    return [
        Function(name=f"{module}.{node.name}", lines=(node.end_lineno or node.lineno) - node.lineno + 1)
        for module, path in modules().items()
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def file_lines() -> dict[str, int]:
    """Lines of every file that is not empty."""
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in modules().items()}
    return {module: count for module, count in lines.items() if count}


def loose_modules(package: str) -> list[str]:
    """Modules directly in the folder of ``package``, without ``__init__``."""
    return sorted(path.stem for path in (ROOT / package).glob("*.py") if path.stem != "__init__")


def percentile(values: Sequence[int], share: float) -> int:
    """The smallest value that at least ``share`` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-int(share * 1000) * len(ordered) // 1000) - 1)]


# -- imports --------------------------------------------------------------------------------------------------------


@cache
def file_imports() -> dict[str, set[str]]:
    """Module -> modules of the packages that it imports anywhere: also inside functions and for type checking."""
    return {module: set(_imports(module)) - {module} for module in modules()}


def _imports(module: str) -> Iterator[str]:
    known = modules()
    for node in ast.walk(_tree(known[module])):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module in known:
            submodules = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from (name if name in known else node.module for name in submodules)


def unit_imports(package: str) -> dict[str, set[str]]:
    """Unit -> other units of ``package``; a unit is a subfolder or a module directly in the folder."""
    graph: dict[str, set[str]] = defaultdict(set)
    for module, targets in file_imports().items():
        if module.startswith(f"{package}."):
            inside = {_unit(target) for target in targets if target.startswith(f"{package}.")}
            graph[_unit(module)] |= inside - {_unit(module)}
    return dict(graph)


def _unit(module: str) -> str:
    return ".".join(module.split(".")[:2])


def upward_imports() -> list[str]:
    """Imports of a higher package, or of the other package of the same level."""
    return [
        f"{module} -> {target}"
        for module, targets in file_imports().items()
        for target in sorted(targets)
        if _is_upward(module.partition(".")[0], target.partition(".")[0])
    ]


def _is_upward(source: str, target: str) -> bool:
    return source != target and LEVEL[target] >= LEVEL[source]


def circles(graph: Graph) -> list[list[str]]:
    """Groups of nodes that import each other, directly or through others (strongly connected components)."""
    reachable = {node: _reachable(graph, node) for node in graph}
    groups = {frozenset(other for other in reachable[node] if node in reachable.get(other, ())) for node in graph}
    return sorted(sorted(group) for group in groups if group)


def _reachable(graph: Graph, start: str) -> set[str]:
    found: set[str] = set()
    waiting = list(graph.get(start, ()))
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting.extend(graph.get(node, ()))
    return found
