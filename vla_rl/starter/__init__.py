"""The project that ``vla-rl init`` writes: the files of this folder, under another name."""

from __future__ import annotations

import importlib.util
import keyword
import sys
from pathlib import Path

from sims.errors import UserError

TEMPLATE = Path(__file__).parent
NAME, CLASS = "my_task", "MyTask"


def write_starter(name: str, parent: Path) -> Path:
    """The new folder ``parent / name``. UserError where it exists, or ``name`` cannot be or is already a module's."""
    if not name.isidentifier() or not name.islower() or keyword.iskeyword(name):
        raise UserError(f"init: {name!r} cannot be a Python package; use lower-case letters, digits and underscores")
    folder = parent / name
    if folder.exists():
        raise UserError(f"init: {folder} exists already; choose another name")
    if name in sys.modules or importlib.util.find_spec(name) is not None:
        raise UserError(f"init: an installed package is called {name}, which this one would hide; choose another name")
    for file in sorted(TEMPLATE.rglob("*")):
        if file.is_dir() or "__pycache__" in file.parts or file == TEMPLATE / "__init__.py":
            continue
        target = folder / str(file.relative_to(TEMPLATE)).replace(NAME, name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(_renamed(file.read_text(encoding="utf-8"), name), encoding="utf-8")
    return folder


def _renamed(text: str, name: str) -> str:
    class_name = "".join(part.capitalize() for part in name.split("_"))
    return text.replace(NAME, name).replace(CLASS, class_name)
