"""Images of a MuJoCo model that another library owns, in the trainer's or a worker's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from sims.errors import UserError
from sims.mujoco.meshes import coarse_meshes

VISUAL_GROUPS = (1, 2)
HIDDEN_GROUP = 5  # the last of MuJoCo's; no simulator draws it


class MujocoCameras:
    """Renders named cameras without the library's own renderer, which is ten times slower in software rendering.

    ``image_size``: (height, width). ``fast``: without shadows, reflections and multisampling; what a camera does not
    see is then left out before it is drawn. ``groups``: the geometry groups that are drawn. ``mesh_detail``: details of
    meshes below this size [m] are left out. UserError for an unknown camera.
    """

    def __init__(
        self,
        model: Any,
        cameras: Sequence[str],
        *,
        image_size: tuple[int, int],
        fast: bool,
        groups: Sequence[int],
        mesh_detail: float = 0.0,
    ) -> None:
        import mujoco

        known = [model.camera(i).name for i in range(model.ncam)]
        unknown = [name for name in cameras if name not in known]
        if unknown:
            raise UserError(f"sim.cameras: there is no camera {unknown[0]!r}; the model has {known}")
        self.cameras, self._model, self._fast = tuple(cameras), model, fast
        height, width = image_size
        model.vis.global_.offheight = max(height, model.vis.global_.offheight)
        model.vis.global_.offwidth = max(width, model.vis.global_.offwidth)
        if fast:
            model.vis.quality.offsamples = 0
        with coarse_meshes(model, mesh_detail):
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
            if self._fast:  # shadows and reflections show what the camera does not see
                self._leave_out_unseen(data, camera, image.shape[1] / image.shape[0])
            self._renderer.render(out=image)

    def _leave_out_unseen(self, data: Any, camera: str, aspect: float) -> None:
        """Update the scene without the geometries whose bounding spheres lie outside of the camera's pyramid."""
        unseen = ~in_view(self._renderer.scene, data.geom_xpos, self._model.geom_rbound, aspect)
        groups = self._model.geom_group
        kept = groups.copy()
        groups[unseen] = HIDDEN_GROUP
        try:
            self._renderer.update_scene(data, camera, self._option)
        finally:
            groups[:] = kept

    def close(self) -> None:
        self._renderer.close()


def in_view(scene: Any, centers: np.ndarray, radii: np.ndarray, aspect: float) -> np.ndarray:
    """Whether spheres reach into what the scene's camera sees, bool [n]; a radius of 0 has no bounds (planes).

    centers: [n, 3], m. aspect: width by height of the image. Of a perspective camera the four sides, as mjr_render sets
    them from the mean of the scene's two cameras (those of a stereo pair); of an orthographic one all is in view.
    """
    first, second = scene.camera

    def mean(name: str) -> Any:
        return (getattr(first, name) + getattr(second, name)) / 2

    if first.orthographic:
        return np.ones(len(centers), dtype=bool)
    near, bottom, top, center = (mean(f"frustum_{name}") for name in ("near", "bottom", "top", "center"))
    half = mean("frustum_width") or aspect * (top - bottom) / 2
    forward, up = mean("forward"), mean("up")
    offset = centers - mean("pos")
    depth, right, upward = offset @ forward, offset @ np.cross(forward, up), offset @ up
    seen = depth > -radii
    for beyond, edge in ((right, center + half), (-right, half - center), (upward, top), (-upward, -bottom)):
        seen &= beyond - depth * edge / near < radii * np.hypot(1.0, edge / near)
    return np.asarray(seen | (radii <= 0))
