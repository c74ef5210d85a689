"""Starting Isaac Lab's runtime, once per process. This module imports no torch, which in 2.x has to come afterwards.

2.x: ``AppLauncher`` starts Isaac Sim before anything else of Isaac Lab is imported. 3.x: ``launch_simulation`` starts
what a task's configuration needs, which may be Isaac Sim or nothing, once that configuration has been read.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from sims.errors import UserError

_app: Any = None  # of 2.x
_launched = contextlib.ExitStack()  # of 3.x; open until the process ends


def is_version_3() -> bool:
    """Whether the installed Isaac Lab is 3.x; its package's own version counts differently. UserError without one."""
    try:
        app = importlib.import_module("isaaclab.app")
    except ModuleNotFoundError as error:
        raise UserError(
            "Isaac Lab is not installed here. It brings its own interpreter: install vla-rl into that one, "
            "see docs/simulators/isaaclab.md."
        ) from error
    return hasattr(app, "launch_simulation")


def start_app(*, device: str, cameras: bool) -> None:
    """2.x: start Isaac Sim without windows."""
    global _app
    if _app is None:
        from isaaclab.app import AppLauncher

        _app = AppLauncher(headless=True, enable_cameras=cameras, device=device).app


def launch(cfg: Any, *, device: str, cameras: bool) -> None:
    """3.x: start what ``cfg``, a task's configuration, needs."""
    from isaaclab.app import launch_simulation

    _launched.enter_context(launch_simulation(cfg, {"device": device, "enable_cameras": cameras}))
