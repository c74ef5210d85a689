"""Results that an earlier call left in a folder count only for a call with the same options."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from episodes.files import write_json
from sims.errors import UserError

OPTIONS = "options.json"


def keep_options(folder: Path, options: Mapping[str, Any]) -> None:
    """Note in ``folder``, which is made where it is missing, with which options its results are made.

    Raises UserError where it holds results of other options, or does not say of which.
    """
    path, hint = folder / OPTIONS, "ask for the same, delete it, or choose another folder"
    if path.exists():
        had = json.loads(path.read_text())
        differing = [name for name in options | had if had.get(name) != options.get(name)]
        if differing:
            said = ", ".join(f"{name} {had.get(name)}, not {options.get(name)}" for name in differing)
            raise UserError(f"{folder} holds results with {said}; {hint}")
        return
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(f"{folder} holds results, but no {OPTIONS} that says with which options; delete it")
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, dict(options))
