"""Where points of the scene are in the cameras' images."""

from __future__ import annotations

import math
from collections.abc import Sequence

import mujoco
import numpy as np
from jaxtyping import Float

from sims.tabletop.layout import Appearance
from sims.tabletop.render import ModelAppearance
from sims.tabletop.scene import build_mjcf


class Projection:
    """Pinhole cameras of one scene, posed as the renderer poses them. Needs no rendering context."""

    def __init__(self, cameras: Sequence[str], image_size: tuple[int, int]) -> None:
        self._model = mujoco.MjModel.from_xml_string(build_mjcf())
        self._data = mujoco.MjData(self._model)
        self._appearance = ModelAppearance(self._model)
        self._ids = [self._model.camera(name).id for name in cameras]
        self._aspect = image_size[1] / image_size[0]

    def __call__(
        self, points: Float[np.ndarray, "n 3"], qpos: np.ndarray, fixtures: np.ndarray, appearance: Appearance
    ) -> Float[np.ndarray, "cameras n 2"]:
        """(right, down) as shares of the image's width and height; NaN behind the camera, outside [0, 1] beside it.

        ``points``: [m] in the base frame. The other arguments: as of ``Renderer.draw``.
        """
        self._appearance.pose(self._data, appearance, qpos, fixtures)
        seen = np.empty((len(self._ids), len(points), 2))
        for i, camera in enumerate(self._ids):
            seen[i] = self._project(points, camera)
        return seen

    def _project(self, points: Float[np.ndarray, "n 3"], camera: int) -> Float[np.ndarray, "n 2"]:
        """MuJoCo's cameras look along -z, x is right and y up."""
        seen = (points - self._data.cam_xpos[camera]) @ self._data.cam_xmat[camera].reshape(3, 3)
        depth = np.where(seen[:, 2] < -1e-3, -seen[:, 2], np.nan)
        half = math.tan(math.radians(self._model.cam_fovy[camera]) / 2)
        right, up = seen[:, 0] / (depth * half * self._aspect), seen[:, 1] / (depth * half)
        return np.stack([(1 + right) / 2, (1 - up) / 2], axis=1)
