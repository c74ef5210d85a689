"""Code blocks of the documentation, as files and commands."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
# ``{.python ...}`` keeps the formatter away from a block that is not Python, as it includes a file.
_BLOCK = re.compile(r'^```(?:\{\.)?(\w+)(?: title="([^"]+)")?\}?\n(.*?)^```$', re.MULTILINE | re.DOTALL)
INCLUDED = re.compile(r'^--8<-- "([^"]+)"$', re.MULTILINE)


def files(page: Path) -> dict[str, str]:
    """Path -> contents of every block with a title; what a block includes is part of it, as on the site."""

    def included(block: str) -> str:
        return INCLUDED.sub(lambda found: (ROOT / found[1]).read_text().removesuffix("\n"), block)

    return {title: included(code) for _, title, code in _BLOCK.findall(page.read_text()) if title}


def commands(page: Path) -> list[list[str]]:
    """The words of every line of the ``sh`` blocks."""
    blocks = [code for language, _, code in _BLOCK.findall(page.read_text()) if language == "sh"]
    return [shlex.split(line, comments=True) for code in blocks for line in code.splitlines() if line.strip()]


def code(page: Path, language: str) -> list[str]:
    return [text for found, _, text in _BLOCK.findall(page.read_text()) if found == language]


def install(project: Path, site: Path) -> None:
    """What ``pip install -e project`` does, as far as Python can tell, in the folder ``site`` of the module path."""
    declared = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    info = site / f"{declared['name']}-{declared['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {declared['name']}\nVersion: {declared['version']}\n")
    groups = [
        "\n".join([f"[{group}]", *(f"{name} = {value}" for name, value in entries.items())])
        for group, entries in declared["entry-points"].items()
    ]
    (info / "entry_points.txt").write_text("\n".join(groups))
