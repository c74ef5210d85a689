"""The names that ``vla-rl init`` takes."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from sims.errors import UserError
from vla_rl.starter import write_starter


@pytest.mark.parametrize("name", ["pour_tea", "a", "level2"])
def test_what_is_written_is_python(tmp_path: Path, name: str) -> None:
    folder = write_starter(name, tmp_path)
    for path in folder.rglob("*.py"):
        ast.parse(path.read_text())


@pytest.mark.parametrize("name", ["tabletop", "libero", "robot"])
def test_a_simulator_has_the_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(UserError, match=f"already a simulator called {name}; choose another name"):
        write_starter(name, tmp_path)
    assert not (tmp_path / name).exists()


@pytest.mark.parametrize("name", ["none", "true", "class", "_x", "x_", "\u00fcber", "Big", "2d", ""])
def test_names_that_no_package_or_class_can_have(tmp_path: Path, name: str) -> None:
    """``none`` would write ``class None``; the name of a distribution begins and ends with a letter or digit."""
    with pytest.raises(UserError, match="cannot be a Python package; use lower-case letters, digits"):
        write_starter(name, tmp_path)
