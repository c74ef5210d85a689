"""Separate interpreters of simulators: lock files, and installations that work or leave nothing."""

from __future__ import annotations

import re
import subprocess
import zipfile
from pathlib import Path

import pytest

from sims import install as installing
from sims.errors import UserError


@pytest.mark.parametrize("name", installing.RECIPES)
def test_every_package_is_pinned_once(name: str) -> None:
    lines = installing._lines(name)
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9.]+", line) for line in lines)
    names = [line.split("==")[0].lower() for line in lines]
    assert len(names) == len(set(names))
    assert "numpy" in names


def test_error_of_an_unknown_simulator_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match="unknown simulator 'gazebo'; known are robosuite, metaworld"):
        installing.install("gazebo", report=print)


def test_failed_installation_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLA_RL_SIMS", str(tmp_path / "sims"))
    monkeypatch.setattr(installing, "LOCKS", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    (tmp_path / "pusht.txt").write_text("numpy==1.2.3.4\n")
    with pytest.raises(UserError, match=r"(?s)sims install pusht: this command failed.*numpy==1.2.3.4"):
        installing.install("pusht", report=lambda line: None)
    assert installing.interpreter("pusht") is None
    assert all(found.python is None for found in installing.list_simulators())


def test_installation_from_a_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A complete installation, with a small package in place of the simulator."""
    wheel = tmp_path / "gym_pusht-7.0-py3-none-any.whl"
    info = "gym_pusht-7.0.dist-info"

    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gym_pusht/__init__.py", "")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gym-pusht\nVersion: 7.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("VLA_RL_SIMS", str(tmp_path / "sims"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(installing, "LOCKS", tmp_path)
    (tmp_path / "pusht.txt").write_text("gym_pusht==7.0\n")
    for name in installing.RECIPES:
        if name != "pusht":
            (tmp_path / f"{name}.txt").write_text("")
    said: list[str] = []
    python = installing.install("pusht", report=said.append)
    assert installing.interpreter("pusht") == str(python)
    subprocess.run([python, "-c", "import gym_pusht"], check=True)
    assert "pusht is ready" in said[-1]
    assert [found.name for found in installing.list_simulators() if found.python and not found.outdated] == ["pusht"]
    (tmp_path / "pusht.txt").write_text("gym_pusht==8.0\n")
    assert [found.name for found in installing.list_simulators() if found.outdated] == ["pusht"]
