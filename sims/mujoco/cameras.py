"""Images of a MuJoCo model that another library owns, in the trainer's or a worker's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from sims.errors import UserError
from sims.mujoco.config import MujocoConfig
from sims.mujoco.detail import low_detail

DEFAULT_GROUPS = (0, 1, 2)  # that MuJoCo draws by default
VISUAL_GROUPS = (1, 2)
NEVER_DRAWN = 5  # a group that MuJoCo's default options hide


class MujocoCameras:
    """Renders named cameras without the library's own renderer, which is ten times slower in software rendering.

    ``config``: with ``fast_rendering``, what a camera does not see is left out before it is drawn; for ``detail`` see
    ``low_detail``. ``groups``: the geometry groups that are drawn. UserError for an unknown camera.
    """

    def __init__(
        self, model: Any, cameras: Sequence[str], config: MujocoConfig, *, groups: Sequence[int] = DEFAULT_GROUPS
    ) -> None:
        import mujoco

        image_size, fast = config.image_size, config.fast_rendering
        known = {model.camera(i).name: i for i in range(model.ncam)}
        unknown = [name for name in cameras if name not in known]
        if unknown:
            raise UserError(f"sim.cameras: there is no camera {unknown[0]!r}; the model has {list(known)}")
        self.cameras, self._model = tuple(cameras), model
        self._numbers = [known[name] for name in cameras]
        self._sides = view_sides(model, self._numbers, image_size) if fast else None  # a shadow shows what is unseen
        height, width = image_size
        model.vis.global_.offheight = max(height, model.vis.global_.offheight)
        model.vis.global_.offwidth = max(width, model.vis.global_.offwidth)
        if fast:
            model.vis.quality.offsamples = 0
        with low_detail(model, image_size) if config.detail == "low" else nullcontext():
            self._renderer = mujoco.Renderer(model, height, width)
        if fast:
            for flag in (mujoco.mjtRndFlag.mjRND_SHADOW, mujoco.mjtRndFlag.mjRND_REFLECTION):
                self._renderer.scene.flags[flag] = 0
        self._option = mujoco.MjvOption()
        self._option.geomgroup[:] = 0
        self._option.geomgroup[list(groups)] = 1

    def render(self, data: Any, images: np.ndarray) -> None:
        """Write uint8 [cameras, height, width, 3], first image row at the top."""
        groups = self._model.geom_group
        kept = groups.copy()
        unseen = None if self._sides is None else beside_views(self._model, data, self._numbers, self._sides)
        for k, (camera, image) in enumerate(zip(self._numbers, images, strict=True)):
            if unseen is not None:
                groups[unseen[k]] = NEVER_DRAWN
            self._renderer.update_scene(data, camera, self._option)
            groups[:] = kept
            self._renderer.render(out=image)

    def close(self) -> None:
        self._renderer.close()


def view_sides(model: Any, cameras: Sequence[int], image_size: tuple[int, int]) -> np.ndarray:
    """Of the four sides of what each camera sees, the directions out of it in its frame, [cameras, 4, 3], of length 1.

    Of a camera with a sensor of its own or without perspective only what lies behind it counts as unseen.
    """
    height, width = image_size
    slopes = np.tan(np.radians(model.cam_fovy) / 2)[:, None] * [width / height, 1.0]  # across and up, along the axis
    orthographic = model.cam_projection if hasattr(model, "cam_projection") else model.cam_orthographic
    slopes[(model.cam_sensorsize > 0).any(axis=1) | (orthographic > 0)] = 1e9
    across, up = slopes[list(cameras)].T
    one, zero = np.ones_like(across), np.zeros_like(across)
    sides = np.array([[one, zero, across], [-one, zero, across], [zero, one, up], [zero, -one, up]]).transpose(2, 0, 1)
    return np.asarray(sides / np.linalg.norm(sides, axis=-1, keepdims=True))  # a camera looks along -z


def beside_views(model: Any, data: Any, cameras: Sequence[int], sides: np.ndarray) -> np.ndarray:
    """Whether each geometry's bounding sphere is wholly outside of a camera's view, so that no pixel shows it.

    sides: [cameras, 4, 3], the cameras' of ``view_sides``. Returns [cameras, geometries].
    """
    numbers = list(cameras)
    outwards = sides @ data.cam_xmat[numbers].reshape(-1, 3, 3).transpose(0, 2, 1)  # in the world
    own = (outwards @ data.cam_xpos[numbers, :, None]).reshape(-1, 1)
    distance = (outwards.reshape(-1, 3) @ data.geom_xpos.T - own).reshape(len(numbers), 4, -1).max(1)  # [m]
    return np.asarray((distance > model.geom_rbound) & (model.geom_rbound > 0))  # a plane is not bounded
