"""Images of the tabletop from MuJoCo's OpenGL renderer, with one context and one model per thread."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import sys
from typing import Any, Literal

import mujoco
import numpy as np

from sims.errors import UserError
from sims.mujoco.cameras import NEVER_DRAWN, beside_views, view_sides
from sims.mujoco.detail import Detail
from sims.tabletop.layout import BLOCK_QPOS, PEG_QPOS, Appearance, fixture_quaternions
from sims.tabletop.scene import BLOCKS, DISTRACTORS, MOCAP, PARKED_X, build_mjcf

GL = Literal["egl", "osmesa"]
LOW_QUADS, LOW_SLICES, LOW_STACKS = 1, 6, 3  # of a box's edge; of a round shape around its axis and along it
_LIBRARIES: dict[GL, str] = {"egl": "libEGL.so.1", "osmesa": "libOSMesa.so.8"}
_PACKAGES = "libegl1 libegl-mesa0 libgl1 libgl1-mesa-dri libgles2 libosmesa6"


def choose_gl(renderer: Literal["auto", "egl", "osmesa"]) -> GL:
    """``renderer`` if it names a platform; for "auto" EGL where its library exists, else OSMesa.

    Raises UserError naming the packages when neither library is there.
    """
    _load_triton()
    if renderer != "auto":
        return renderer
    for gl, library in _LIBRARIES.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            continue
        return gl
    raise UserError(f"rendering needs EGL or OSMesa and neither was found. Run: apt-get install -y {_PACKAGES}")


def _load_triton() -> None:
    """Loads Triton before a renderer, where PyTorch's CUDA build brought it.

    PyTorch imports it with the first optimizer, and the process crashes where its LLVM is loaded after that of Mesa's
    software renderer.
    """
    with contextlib.suppress(ImportError):
        importlib.import_module("triton")


def _open_context(gl: GL, width: int, height: int) -> Any:
    # Otherwise llvmpipe starts a thread per core in each context.
    os.environ.setdefault("LP_NUM_THREADS", "0")
    if "OpenGL" not in sys.modules:
        os.environ["PYOPENGL_PLATFORM"] = gl  # may still have the value of a parent process
    try:
        if gl == "egl":
            from mujoco.egl import GLContext
        else:
            from mujoco.osmesa import GLContext
        context = GLContext(width, height)
        context.make_current()
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UserError(f"cannot open a rendering context of {gl} ({error}). {_next_step(gl)}") from error
    return context


def _next_step(gl: GL) -> str:
    """For whom a context of ``gl`` cannot be opened. A process renders with one platform, the first that it loads."""
    loaded = os.environ.get("PYOPENGL_PLATFORM", gl).lower() if "OpenGL" in sys.modules else gl
    chosen = os.environ.get("MUJOCO_GL")
    if loaded == gl:
        return f"Run: apt-get install -y {_PACKAGES}; or set sim.renderer: {'osmesa' if gl == 'egl' else 'egl'}"
    if chosen:
        return f"MUJOCO_GL={chosen} chose {loaded} for this process. Unset it, or set sim.renderer: {loaded}"
    return f"This process renders with {loaded} already. Set sim.renderer: {loaded}"


TABLE_CENTER = np.array([0.45, 0.0, 0.1])  # [m]


class ModelAppearance:
    """Applies the appearance of an episode to one MuJoCo model."""

    def __init__(self, model: mujoco.MjModel) -> None:
        self.model = model
        self._block_geoms = [model.geom(name).id for name in BLOCKS]
        self._pair_geoms = []
        for i in range(2):
            names = (f"mat{i}", f"drawer{i}_front", *(f"hole{i}_{k}" for k in range(4)))
            self._pair_geoms.append([model.geom(name).id for name in names])
        self._background = [model.geom(name).id for name in ("surface", "tabletop", "wall")]
        self._distractors = [model.geom(name).id for name in DISTRACTORS]
        self._alpha = model.geom_rgba[:, 3].copy()
        roots = model.body_rootid[model.geom_bodyid]
        objects = [model.body(name).id for name in (*MOCAP, *BLOCKS, "peg")]
        self._belongs = roots[:, None] == np.array(objects)  # [geometries, objects]
        self._cam_pos, self._cam_quat = model.cam_pos.copy(), model.cam_quat.copy()
        self._agent_wrist = [model.camera(name).id for name in ("agent", "wrist")]

    def pose(self, data: mujoco.MjData, appearance: Appearance, qpos: np.ndarray, fixtures: np.ndarray) -> None:
        """Put bodies, cameras and lights where they are in this state, with its appearance."""
        self.apply(appearance, qpos, fixtures)
        data.qpos[:] = qpos
        data.mocap_pos[:], data.mocap_quat[:] = fixtures[:, :3], fixture_quaternions(fixtures)
        mujoco.mj_kinematics(self.model, data)
        mujoco.mj_camlight(self.model, data)

    def apply(self, appearance: Appearance, qpos: np.ndarray, fixtures: np.ndarray) -> None:
        """Set colors, light and cameras; objects that are parked in this state become invisible."""
        model = self.model
        # A fully transparent geometry is not drawn at all.
        free = qpos[BLOCK_QPOS.start : PEG_QPOS.stop : 7]
        parked = np.concatenate([fixtures[:, 0], free]) > PARKED_X - 0.5
        model.geom_rgba[:, 3] = np.where(self._belongs @ parked, 0.0, self._alpha)
        model.geom_rgba[self._block_geoms, :3] = appearance.blocks
        for geoms, rgb in zip(self._pair_geoms, appearance.pair, strict=True):
            model.geom_rgba[geoms, :3] = rgb
        model.geom_rgba[self._background, :3] = appearance.background
        model.geom_rgba[self._distractors, :3] = appearance.distractor_rgb
        model.geom_pos[self._distractors] = appearance.distractors
        model.light_dir[0] = appearance.light_direction
        model.light_pos[0] = TABLE_CENTER - appearance.light_direction  # the middle of the shadows
        model.light_diffuse[0] = appearance.light
        turn = np.empty(4)
        for camera, offset, angle in zip(
            self._agent_wrist, appearance.camera_offset, appearance.camera_turn, strict=True
        ):
            model.cam_pos[camera] = self._cam_pos[camera] + offset
            mujoco.mju_copy(turn, self._cam_quat[camera])
            mujoco.mju_quatIntegrate(turn, angle, 1.0)
            model.cam_quat[camera] = turn


class Renderer:
    """Draws one state at a time. Must be used, and closed, in the thread that created it."""

    def __init__(
        self,
        *,
        gl: GL,
        cameras: tuple[str, ...],
        image_size: tuple[int, int],
        shadows: bool = False,
        detail: Detail = "full",
    ) -> None:
        height, width = image_size
        self._gl = _open_context(gl, width, height)
        model = mujoco.MjModel.from_xml_string(build_mjcf())
        model.vis.global_.offwidth, model.vis.global_.offheight = width, height
        if detail == "low":
            quality = model.vis.quality
            quality.numquads, quality.numslices, quality.numstacks = LOW_QUADS, LOW_SLICES, LOW_STACKS
        if shadows:
            model.vis.quality.shadowsize, model.vis.quality.offsamples = 4096, 8
            model.light_castshadow[:], model.vis.map.shadowclip = True, 0.6
        self._model, self._data = model, mujoco.MjData(model)
        self._context = mujoco.MjrContext(model, mujoco.mjtFontScale.mjFONTSCALE_50)
        mujoco.mjr_setBuffer(mujoco.mjtFramebuffer.mjFB_OFFSCREEN, self._context)
        self._scene = mujoco.MjvScene(model, maxgeom=model.ngeom + 8)
        self._scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = shadows
        for flag in ("REFLECTION", "SKYBOX", "HAZE", "FOG"):
            self._scene.flags[getattr(mujoco.mjtRndFlag, f"mjRND_{flag}")] = False
        self._option = mujoco.MjvOption()
        self._viewport = mujoco.MjrRect(0, 0, width, height)
        self._buffer = np.empty((height, width, 3), dtype=np.uint8)
        self._camera_ids = [model.camera(name).id for name in cameras]
        self._cameras = []
        for camera_id in self._camera_ids:
            camera = mujoco.MjvCamera()
            camera.type, camera.fixedcamid = mujoco.mjtCamera.mjCAMERA_FIXED, camera_id
            self._cameras.append(camera)
        self._appearance = ModelAppearance(model)
        self._group = model.geom_group.copy()
        self._sides = view_sides(model, self._camera_ids, image_size)
        self._culls = not shadows  # what is not seen may cast one

    def draw(self, qpos: np.ndarray, fixtures: np.ndarray, appearance: Appearance, out: np.ndarray) -> None:
        """Render every camera of this state into ``out`` [cameras, height, width, 3], first image row at the top."""
        self._gl.make_current()
        model, data = self._model, self._data
        self._appearance.pose(data, appearance, qpos, fixtures)
        if self._culls:
            groups = np.where(beside_views(model, data, self._camera_ids, self._sides), NEVER_DRAWN, self._group)
        for k, (camera, image) in enumerate(zip(self._cameras, out, strict=True)):
            if self._culls:
                model.geom_group[:] = groups[k]
            mujoco.mjv_updateScene(
                model, data, self._option, None, camera, mujoco.mjtCatBit.mjCAT_ALL.value, self._scene
            )
            mujoco.mjr_render(self._viewport, self._scene, self._context)
            mujoco.mjr_readPixels(self._buffer, None, self._viewport, self._context)
            image[:] = self._buffer[::-1]

    def close(self) -> None:
        """Free the GL resources; call it in the thread that made the renderer."""
        self._gl.make_current()  # else those of another renderer of this thread would be freed
        self._context.free()
        self._gl.free()
