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
        self._slopes = view_slopes(model, self._numbers, image_size) if fast else None  # a shadow shows what is unseen
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
        for k, (camera, image) in enumerate(zip(self._numbers, images, strict=True)):
            if self._slopes is not None:
                groups[beside_view(self._model, data, camera, self._slopes[k])] = NEVER_DRAWN
            self._renderer.update_scene(data, camera, self._option)
            groups[:] = kept
            self._renderer.render(out=image)

    def close(self) -> None:
        self._renderer.close()


def view_slopes(model: Any, cameras: Sequence[int], image_size: tuple[int, int]) -> np.ndarray:
    """Of the sides of what each camera sees, [cameras, 2]: across and up, per distance along its axis.

    Of a camera with a sensor of its own or without perspective only what lies behind it counts as unseen.
    """
    height, width = image_size
    slopes = np.tan(np.radians(model.cam_fovy) / 2)[:, None] * [width / height, 1.0]
    orthographic = model.cam_projection if hasattr(model, "cam_projection") else model.cam_orthographic
    slopes[(model.cam_sensorsize > 0).any(axis=1) | (orthographic > 0)] = 1e9
    return np.asarray(slopes[list(cameras)])


def beside_view(model: Any, data: Any, camera: int, slopes: np.ndarray) -> np.ndarray:
    """Whether each geometry's bounding sphere is wholly outside of the view's sides, so that no pixel shows it.

    slopes: [2], the camera's of ``view_slopes``.
    """
    seen = (data.geom_xpos - data.cam_xpos[camera]) @ data.cam_xmat[camera].reshape(3, 3)  # looks along -z
    distance = (np.abs(seen[:, :2]) + seen[:, 2:] * slopes) / np.hypot(1.0, slopes)  # from the sides [m]
    bounded = model.geom_rbound > 0  # a plane is not
    return np.asarray(bounded & (distance > model.geom_rbound[:, None]).any(1))
