"""How worker processes run: their interpreter, their devices, and for how long they may be silent."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from sims.errors import UserError
from sims.install import interpreter


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """How worker processes run.

    ``python``: their interpreter. ``environment``: the name of one that ``vla-rl sims install`` made, by default the
    simulator's own name. Without either it is the trainer's. ``gl``: how MuJoCo-based simulators render. ``devices``:
    GPUs for rendering, dealt out row by row; none leaves the choice to the driver. A worker that takes longer than its
    time-out for starting, one reset or one control step counts as failed; ``max_failures_in_a_row`` failures of a row
    without a chunk between them are endured, one more stops the run.
    """

    python: str | None = None
    environment: str | None = None
    gl: Literal["egl", "osmesa", "glfw"] = "egl"
    devices: tuple[int, ...] = ()
    start_timeout_s: float = 600.0
    reset_timeout_s: float = 120.0
    step_timeout_s: float = 30.0
    max_failures_in_a_row: int = 3


def environment_of(config: WorkerConfig, row: int) -> dict[str, str]:
    """One thread per worker, its renderer, and its device."""
    chosen = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MUJOCO_GL": config.gl}
    chosen["PYOPENGL_PLATFORM"] = config.gl
    if config.devices:
        device = str(config.devices[row % len(config.devices)])
        chosen |= {"MUJOCO_EGL_DEVICE_ID": device, "CUDA_VISIBLE_DEVICES": device}
    return chosen


def interpreter_of(config: WorkerConfig, name: str) -> str:
    """Which Python runs the workers of simulator ``name``; UserError if the one asked for does not exist."""
    installed = interpreter(config.environment or name)
    if config.environment and not installed:
        raise UserError(
            f"sim.workers.environment: {config.environment!r} is not installed. Run: vla-rl sims install "
            f"{config.environment}"
        )
    path = config.python or installed or sys.executable
    if not Path(path).exists():
        raise UserError(f"sim.workers.python: there is no interpreter at {path}. Leave it out to use the default.")
    return path
