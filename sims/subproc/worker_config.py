"""Settings of worker processes: interpreter, devices and time-outs."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from sims.errors import UserError
from sims.install import interpreter
from sims.numbers.ranges import Count, PositiveFloat, PositiveInt
from sims.subproc.latency import Latency


@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Settings of worker processes.

    ``python``: path of their interpreter. ``environment``: name of an interpreter that ``vla-rl sims install`` made, by
    default the simulator's own name. Without either, the trainer's interpreter is used. ``gl``: OpenGL platform of
    MuJoCo-based simulators. ``devices``: GPUs for rendering, assigned to environments in turn; empty: the driver
    chooses. A worker that takes longer than its time-out for its start, one reset or one control step has failed; on a
    machine with more running processes than cores the time-outs are longer in proportion. More
    than ``max_failures_in_a_row`` failures of an environment without a completed chunk in between stop the run.
    """

    python: Path | None = None
    environment: str | None = None
    gl: Literal["egl", "osmesa", "glfw"] = "egl"
    devices: tuple[Count, ...] = ()
    start_timeout_s: PositiveFloat = 600.0
    reset_timeout_s: PositiveFloat = 120.0
    step_timeout_s: PositiveFloat = 30.0
    max_failures_in_a_row: Count = 3


@dataclass(frozen=True, kw_only=True)
class WorkerPoolConfig:
    """Settings of every simulator that runs in worker processes; its own configuration derives from this."""

    name: str
    num_envs: PositiveInt = 8
    latency: Latency = field(default_factory=Latency)
    workers: WorkerConfig = field(default_factory=WorkerConfig)


def environment_variables(config: WorkerConfig, env_id: int) -> dict[str, str]:
    """For the worker of ``env_id``: one thread, its renderer and its device."""
    chosen = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "MUJOCO_GL": config.gl}
    chosen["PYOPENGL_PLATFORM"] = config.gl
    if config.devices:
        device = str(config.devices[env_id % len(config.devices)])
        chosen |= {"MUJOCO_EGL_DEVICE_ID": device, "CUDA_VISIBLE_DEVICES": device}
    return chosen


def interpreter_of(config: WorkerConfig, name: str) -> str:
    """The Python that runs the workers of simulator ``name``. UserError if the configured one does not exist."""
    installed = interpreter(config.environment or name)
    if config.environment and not installed:
        raise UserError(
            f"sim.workers.environment: {config.environment!r} is not installed. Run: vla-rl sims install "
            f"{config.environment}"
        )
    path = Path(config.python or installed or sys.executable)
    if not path.exists():
        raise UserError(f"sim.workers.python: there is no interpreter at {path}. Leave it out to use the default.")
    return str(path)
