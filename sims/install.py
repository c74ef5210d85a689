"""Environments of simulators whose pins collide with the trainer's: ``vla-rl sims list`` and ``sims install NAME``."""

from __future__ import annotations

import os
from pathlib import Path


def environments_folder() -> Path:
    """``$VLA_RL_SIMS``, by default ~/.cache/vla-rl/sims."""
    chosen = os.environ.get("VLA_RL_SIMS")
    return Path(chosen) if chosen else Path.home() / ".cache" / "vla-rl" / "sims"


def interpreter(name: str) -> str | None:
    """The Python of an installed simulator's environment; None if it has none."""
    path = environments_folder() / name / "bin" / "python"
    return str(path) if path.exists() else None
