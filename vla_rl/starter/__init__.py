"""The project that ``vla-rl init`` writes: the files of this folder, under another name."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from pathlib import Path

from sims.errors import UserError
from sims.plugins import config_name
from vla_rl.config.environments import ENVIRONMENTS

TEMPLATE = Path(__file__).parent
NAME, CLASS = "my_task", "MyTask"
NAMES = re.compile("[a-z]([a-z0-9_]*[a-z0-9])?")


def write_starter(name: str, parent: Path) -> Path:
    """The new folder ``parent / name``.

    UserError where it exists, or ``name`` cannot be a package's and a class's, or is a module's or a simulator's.
    """
    if not NAMES.fullmatch(name) or keyword.iskeyword(name) or keyword.iskeyword(_class_name(name)):
        raise UserError(
            f"init: {name!r} cannot be a Python package; use lower-case letters, digits and, between them, underscores"
        )
    if name in map(config_name, ENVIRONMENTS):
        raise UserError(f"init: there is already a simulator called {name}; choose another name")
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
    return text.replace(NAME, name).replace(CLASS, _class_name(name))


def _class_name(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))
