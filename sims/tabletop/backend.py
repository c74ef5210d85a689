"""Physics and rendering of the tabletop suite: the interface, and the constructor of each backend."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from sims.errors import UserError
from sims.tabletop.config import TabletopConfig
from sims.tabletop.layout import Layout
from sims.tabletop.mujoco_backend import MujocoBackend


@runtime_checkable
class Backend(Protocol):
    """N copies of the tabletop model on one device."""

    device: torch.device

    @property
    def renderer(self) -> str:
        """Name of the renderer, for the fingerprint."""
        ...

    @property
    def qpos(self) -> Float[Tensor, "N nq"]:
        """Generalized positions of every environment, float64; valid until the next step."""
        ...

    def place(self, env_id: int, layout: Layout) -> None:
        """Put an environment into the initial state of ``layout``, at rest."""
        ...

    def snapshot(self, env_id: int) -> np.ndarray:
        """The physics state of an environment, [SNAPSHOT_SIZE] float64."""
        ...

    def restore(self, env_id: int, snapshot: np.ndarray) -> None:
        """Inverse of ``snapshot``, after ``place`` of the same layout."""
        ...

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of every environment's physics state and of the inputs of its last substep."""
        ...

    def step(self, running: Bool[Tensor, " N"], controls: Float[Tensor, "N substeps nu"]) -> None:
        """Advance the ``running`` environments by one control step; ``controls``: actuator inputs of each substep."""
        ...

    def render(self, env_ids: Sequence[int]) -> UInt8[Tensor, "n cameras height width 3"]: ...

    def close(self) -> None: ...


def _mujoco(config: TabletopConfig) -> Backend:
    return MujocoBackend(
        num_envs=config.num_envs,
        threads=config.threads or len(os.sched_getaffinity(0)),
        cameras=config.cameras,
        image_size=config.image_size,
        renderer=config.renderer,
        shadows=config.shadows,
        detail=config.detail,
    )


def _warp(config: TabletopConfig) -> Backend:
    try:
        from sims.tabletop.warp_backend import WarpBackend
    except ModuleNotFoundError as error:
        message = f"backend='warp' needs {error.name}, which is not installed. Run: pip install 'vla-rl[warp]'"
        raise UserError(message) from error
    return WarpBackend(num_envs=config.num_envs, cameras=config.cameras, image_size=config.image_size)


BACKENDS: Mapping[str, Callable[[TabletopConfig], Backend]] = {"mujoco": _mujoco, "warp": _warp}


def open_backend(config: TabletopConfig) -> Backend:
    """Raises UserError where the backend's packages are not installed."""
    return BACKENDS[config.backend](config)
