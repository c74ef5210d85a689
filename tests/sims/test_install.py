"""Separate interpreters of simulators: lock files, and installations that work or leave nothing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import pytest

from sims import install as installing
from sims.errors import UserError
from sims.experts.pusht import check_pusht_arguments
from sims.vector_env import VectorEnv
from sims.verification.conformance import CHECKS
from sims.verification.verify import verify
from vla_rl.cli import main as cli


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


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A small package in place of the simulator pusht, the only one that can be installed."""
    wheel = tmp_path / "gym_pusht-7.0-py3-none-any.whl"
    info = "gym_pusht-7.0.dist-info"

    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gym_pusht/__init__.py", "def push(): print('pushed')")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: gym-pusht\nVersion: 7.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/entry_points.txt", "[console_scripts]\npush-a-t = gym_pusht:push\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("VLA_RL_SIMS", str(tmp_path / "sims"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setattr(installing, "LOCKS", tmp_path)
    (tmp_path / "pusht.txt").write_text("gym_pusht==7.0\n")
    for name in installing.RECIPES:
        if name != "pusht":
            (tmp_path / f"{name}.txt").write_text("")


@pytest.mark.usefixtures("wheel")
def test_installation_from_a_wheel(tmp_path: Path) -> None:
    said: list[str] = []
    python = installing.install("pusht", report=said.append)
    assert installing.interpreter("pusht") == str(python)
    subprocess.run([python, "-c", "import gym_pusht"], check=True)
    done = subprocess.run([python.parent / "push-a-t"], check=True, capture_output=True, text=True)
    assert done.stdout == "pushed\n"
    assert "pusht is ready" in said[-1]
    assert [found.name for found in installing.list_simulators() if found.python and not found.outdated] == ["pusht"]
    (tmp_path / "pusht.txt").write_text("gym_pusht==8.0\n")
    assert [found.name for found in installing.list_simulators() if found.outdated] == ["pusht"]


@pytest.mark.usefixtures("wheel")
def test_an_update_that_is_interrupted_leaves_a_complete_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = installing.install("pusht", report=print)
    with monkeypatch.context() as patch:
        remove = shutil.rmtree

        def interrupted(path: Path, **options: bool) -> None:
            """Ctrl-C in the middle of the removal of an environment."""
            remove(path / "lib" if (path / "bin").exists() else path, **options)
            if path.exists():
                raise KeyboardInterrupt

        patch.setattr(shutil, "rmtree", interrupted)
        with pytest.raises(KeyboardInterrupt):
            installing.install("pusht", report=print)
    subprocess.run([python, "-c", "import gym_pusht"], check=True)
    old = tmp_path / "sims" / ".pusht.old"
    shutil.rmtree(old)
    python.parents[1].rename(old)  # as if interrupted between the two renames
    (tmp_path / "pusht.txt").write_text("gym_pusht==8.0\n")
    with pytest.raises(UserError, match="this command failed"):
        installing.install("pusht", report=print)
    subprocess.run([python, "-c", "import gym_pusht"], check=True)


def test_verify_checks_the_contract_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["sims", "verify", "tabletop", "--json"])
    result = json.loads(capsys.readouterr().out)
    assert [check["name"] for check in result["checks"]] == ["starts", *CHECKS]
    assert {check["status"] for check in result["checks"]} == {"ok"}


def test_verify_names_what_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def paid_for_nothing(env: VectorEnv) -> None:
        raise AssertionError("reward 0.5 without success")

    monkeypatch.setattr("sims.verification.verify.CHECKS", {"reward": paid_for_nothing})
    assert [result.broken for result in verify("tabletop")] == [None, "reward 0.5 without success"]
    with pytest.raises(UserError, match="unknown simulator 'gazebo'; known are"):
        list(verify("gazebo"))


def test_small_images_of_pusht_are_refused_with_a_sentence() -> None:
    check_pusht_arguments({"visualization_width": 96, "render_mode": "rgb_array"})
    with pytest.raises(UserError, match=r"sim.arguments.visualization_width: .* 96 pixels or more, got 64"):
        check_pusht_arguments({"visualization_width": 64})
