"""Interpreters for simulators whose pins collide with the trainer's: ``vla-rl sims list`` and ``sims install NAME``."""

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
    """What ``locks/NAME.txt`` pins, and what there is to know before.

    ``module``: what must be importable afterwards. ``resolve``: let pip add dependencies to the locked list, for
    packages whose dependencies depend on the machine (torch).
    """

    summary: str
    module: str
    before: str = ""
    resolve: bool = False


RECIPES = {
    "robosuite": Recipe(summary="robosuite 1.5.2 with MuJoCo 3.9", module="robosuite"),
    "metaworld": Recipe(summary="Meta-World 3.1 with MuJoCo 3.3, scripted experts", module="metaworld"),
    "maniskill": Recipe(
        summary="ManiSkill 3.0.1 with SAPIEN 3.0",
        module="sapien",
        before="without an NVIDIA GPU it needs Mesa 25 or newer (Vulkan on the CPU), also for tasks without pictures",
        resolve=True,
    ),
    "libero": Recipe(
        summary="LIBERO (hf-libero 0.1.4) with robosuite 1.4",
        module="robosuite",
        before="the objects and scenes of the benchmark are a separate download: see docs/simulators/libero.md",
        resolve=True,
    ),
    "pusht": Recipe(summary="gym-pusht 0.1.8, for sim.name: gymnasium", module="gym_pusht"),
    "aloha": Recipe(summary="gym-aloha 0.1.5, for sim.name: gymnasium", module="gym_aloha"),
}


@dataclass(frozen=True, kw_only=True)
class Installed:
    """``python`` is None where the simulator is not installed; ``outdated``: its locked list changed since."""

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


def list_simulators() -> list[Installed]:
    found = []
    for name, recipe in RECIPES.items():
        python = interpreter(name)
        lock = environments_folder() / name / "lock.sha256"
        outdated = python is not None and (not lock.exists() or lock.read_text() != _digest(name))
        found.append(
            Installed(name=name, summary=recipe.summary, python=Path(python) if python else None, outdated=outdated)
        )
    return found


def install(name: str, *, report: Callable[[str], None]) -> Path:
    """Make the environment of simulator ``name`` and return its interpreter.

    It is made beside its place and moved there when it works, so an interrupted installation leaves nothing that looks
    finished, and a working environment stays until the new one replaces it. ``report`` is told what happens.
    """
    if name not in RECIPES:
        raise UserError(f"sims install: there is no {name!r}; there are {', '.join(RECIPES)}")
    recipe, place = RECIPES[name], environments_folder() / name
    if recipe.before:
        report(f"{name}: {recipe.before}")
    fresh = place.with_name(f".{name}.new")
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.parent.mkdir(parents=True, exist_ok=True)
    report(f"making {place} with Python {sys.version_info.major}.{sys.version_info.minor}")
    _run([sys.executable, "-m", "venv", str(fresh)], name)
    python = str(fresh / "bin" / "python")
    report(f"installing the {len(_lines(name))} packages of sims/locks/{name}.txt")
    plain = [] if recipe.resolve else ["--no-deps"]
    packages = [line for line in _lines(name) if not line.startswith("hf_libero")]
    _run([python, "-m", "pip", "install", "--quiet", *plain, *packages], name)
    alone = [line for line in _lines(name) if line.startswith("hf_libero")]  # its metadata demands half a workstation
    if alone:
        _run([python, "-m", "pip", "install", "--quiet", "--no-deps", *alone], name)
    _run([python, "-c", f"import {recipe.module}"], name)
    (fresh / "lock.sha256").write_text(_digest(name))
    shutil.rmtree(place, ignore_errors=True)
    fresh.rename(place)
    report(f"{name} is ready: {place}")
    return place / "bin" / "python"


def _run(command: list[str], name: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=False)
    if done.returncode != 0:
        tail = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise UserError(f"sims install {name}: this failed:\n  {' '.join(command[:6])} ...\nIts last words:\n{tail}")


def _lines(name: str) -> list[str]:
    return [line for line in (LOCKS / f"{name}.txt").read_text().split("\n") if line]


def _digest(name: str) -> str:
    return hashlib.sha256((LOCKS / f"{name}.txt").read_bytes()).hexdigest()
