"""Images of a MuJoCo model that another library owns, in the trainer's or a worker's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sims.errors import UserError

VISUAL_GROUPS = (1, 2)


class MujocoCameras:
    """Renders named cameras without the library's own renderer, which is ten times slower in software rendering.

    ``image_size``: (height, width). ``fast``: without shadows, reflections and multisampling. ``groups``: the geometry
    groups that are drawn. UserError for an unknown camera.
    """

    def __init__(
        self, model: Any, cameras: Sequence[str], *, image_size: tuple[int, int], fast: bool, groups: Sequence[int]
    ) -> None:
        import mujoco

        known = [model.camera(i).name for i in range(model.ncam)]
        unknown = [name for name in cameras if name not in known]
        if unknown:
            raise UserError(f"sim.cameras: there is no camera {unknown[0]!r}; the model has {known}")
        self.cameras = tuple(cameras)
        height, width = image_size
        model.vis.global_.offheight = max(height, model.vis.global_.offheight)
        model.vis.global_.offwidth = max(width, model.vis.global_.offwidth)
        if fast:
            model.vis.quality.offsamples = 0
        self._renderer = mujoco.Renderer(model, height, width)
        if fast:
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._renderer.scene.flags[flag] = 0
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[list(groups)] = 1

    def render(self, data: Any, images: np.ndarray) -> None:
        """Write uint8 [cameras, height, width, 3], first image row at the top."""
        for camera, image in zip(self.cameras, images, strict=True):
            self._renderer.update_scene(data, camera, self._option)
            self._renderer.render(out=image)

    def close(self) -> None:
        self._renderer.close()
