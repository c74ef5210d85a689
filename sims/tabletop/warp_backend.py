"""Physics and images from MuJoCo Warp, for all environments at once on a CUDA GPU, or on the CPU where there is none.

Both devices run the same code: state, controls, appearance and images are torch views of Warp's arrays, and the ten
substeps and the rendering are each recorded once as a Warp graph and replayed. On CUDA no data leaves the GPU in
``step`` or ``render``. As in C MuJoCo, every control step starts the solver without warm start, so an environment's
future depends on its state and inputs alone. Resets are collected on the host and uploaded together before their first
use.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import mujoco
import mujoco_warp as mjw
import numpy as np
import torch
import warp as wp
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from sims.tabletop.layout import NQ, Layout, fixture_quaternions, sample_layout
from sims.tabletop.mujoco_backend import SNAPSHOT_SIZE, holding_forces
from sims.tabletop.render import ModelAppearance
from sims.tabletop.scene import SUBSTEPS, build_mjcf
from sims.tabletop.tasks.registry import TASKS

CONTACTS = 48  # per environment on average, in one pool for all; the experts need at most 20
CONSTRAINTS = 160  # of one environment at most; the experts need 61
_log = logging.getLogger(__name__)
_APPEARANCE_FIELDS = ("geom_rgba", "geom_pos", "light_dir", "light_diffuse", "cam_pos", "cam_quat")


class WarpBackend:
    """``num_envs`` copies of the tabletop model on the current CUDA device, or on the CPU where torch sees none.

    The first use on a machine compiles the kernels, which takes minutes; Warp keeps them in its cache folder.
    """

    def __init__(self, *, num_envs: int, cameras: tuple[str, ...], image_size: tuple[int, int]) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._cameras, self._image_size = cameras, image_size
        model = mujoco.MjModel.from_xml_string(build_mjcf())
        model.opt.disableflags &= ~int(mujoco.mjtDisableBit.mjDSBL_MIDPHASE)  # of the CPU alone
        self._appearance, self._hold = ModelAppearance(model), holding_forces(model)
        self._placed: dict[int, Layout] = {}
        self._pending_states: dict[int, np.ndarray] = {}
        self._host: np.ndarray | None = None
        wp.config.log_level = wp.LOG_WARNING  # otherwise Warp prints a line for each of its modules
        wp.init()
        cache = Path(str(wp.config.kernel_cache_dir))
        if not any(cache.glob("wp_*/*.sm*" if cuda else "wp_*/*.cpu*")):
            _log.warning("compiling the kernels of MuJoCo Warp into %s; this takes minutes, once", cache)
        with wp.ScopedDevice(wp.device_from_torch(self.device)):
            self._open(model, num_envs)

    def _open(self, model: mujoco.MjModel, num_envs: int) -> None:
        self._model = mjw.put_model(model, dict.fromkeys(_APPEARANCE_FIELDS, num_envs))
        option = self._model.opt
        # Without DeterminismType.ATOMICS, which sorts every sum: 40 times slower with 256 environments (H200).
        option.deterministic = mjw.DeterminismType.CONTACTS | mjw.DeterminismType.CONSTRAINT
        option.graph_conditional = wp.is_conditional_graph_supported()
        # Reaching the iteration limit is accepted in this model; every other overflow prints a warning.
        option.warn_overflow &= ~(mjw.OverflowType.ITERATIONS | mjw.OverflowType.LS_ITERATIONS)
        start = mujoco.MjData(model)
        layout = sample_layout(next(iter(TASKS)), 0, split="train", appearance=0.0)
        start.qpos[:], start.mocap_pos[:] = layout.qpos, layout.fixtures[:, :3]
        self._data = data = mjw.put_data(model, start, nworld=num_envs, nconmax=CONTACTS, njmax=CONSTRAINTS)
        self._time, self._qpos, self._qvel = (wp.to_torch(a) for a in (data.time, data.qpos, data.qvel))
        self._warm_start = wp.to_torch(data.qacc_warmstart)
        self._applied = wp.to_torch(data.qfrc_applied)
        self._fixtures = wp.to_torch(data.mocap_pos), wp.to_torch(data.mocap_quat)
        self._appearance_arrays = {name: wp.to_torch(getattr(self._model, name)) for name in _APPEARANCE_FIELDS}
        self._substep_controls = wp.zeros((SUBSTEPS, num_envs, model.nu), dtype=wp.float32)
        self._controls = wp.to_torch(self._substep_controls)
        self._advance = self._record(self._substeps)
        if self._cameras:
            height, width = self._image_size
            self._context = mjw.create_render_context(
                model,
                nworld=num_envs,
                cam_res=(width, height),
                render_rgb=True,
                use_textures=False,
                cam_active=list(self._cameras),
            )
            # Bytes of a pixel, from low to high: blue, green, red, alpha.
            self._pixels = wp.to_torch(self._context.rgb_data).view(torch.uint8)
            self._draw = self._record(self._draw_all)

    def _record(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work`` as a graph to replay on torch's current stream. It is run once before, to compile its kernels."""
        work()
        with wp.ScopedCapture() as capture:
            work()
        wp.synchronize()

        def replay() -> None:
            cuda = self.device.type == "cuda"
            stream = wp.stream_from_torch(torch.cuda.current_stream(self.device)) if cuda else None
            wp.capture_launch(capture.graph, stream=stream)

        return replay

    def _substeps(self) -> None:
        for substep in range(SUBSTEPS):
            wp.copy(self._data.ctrl, self._substep_controls[substep])
            mjw.step(self._model, self._data)

    def _draw_all(self) -> None:
        mjw.kinematics(self._model, self._data)
        mjw.camlight(self._model, self._data)
        mjw.refit_bvh(self._model, self._data, self._context)
        mjw.render(self._model, self._data, self._context)

    @property
    def renderer(self) -> str:
        """Name of the renderer, for the fingerprint."""
        return f"mujoco-warp {mjw.__version__} on {self.device.type}"

    @property
    def qpos(self) -> Float[Tensor, "N nq"]:
        """Generalized positions of every environment (a copy), float64."""
        self._upload()
        return self._qpos.double()

    def place(self, env_id: int, layout: Layout) -> None:
        """Put an environment into the initial state of ``layout``, at rest."""
        state = np.zeros(SNAPSHOT_SIZE)
        state[1 : 1 + NQ] = layout.qpos
        self._placed[env_id] = layout
        self.restore(env_id, state)

    def snapshot(self, env_id: int) -> np.ndarray:
        """The physics state of an environment, [SNAPSHOT_SIZE] float64 (of float32 precision)."""
        return self._download()[env_id].copy()

    def restore(self, env_id: int, snapshot: np.ndarray) -> None:
        """Inverse of ``snapshot``, after ``place`` of the same layout."""
        self._pending_states[env_id] = snapshot
        self._host = None

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of every environment's physics state and of the inputs of its last substep, as those of C MuJoCo."""
        state = self._download().copy()
        inputs = [self._controls[-1], self._applied, *(part.flatten(1) for part in self._fixtures)]
        return state, torch.cat(inputs, dim=1).double().cpu().numpy()

    def _download(self) -> np.ndarray:
        """The physics state of every environment [N, SNAPSHOT_SIZE], copied to the host once per step."""
        self._upload()
        if self._host is None:
            self._host = torch.cat([self._time[:, None], self._qpos, self._qvel], dim=1).double().cpu().numpy()
        return self._host

    def _upload(self) -> None:
        """Copy the states that were placed or restored since the last upload to the device."""
        if not self._pending_states:
            return
        env_ids, state = self._to_device(self._pending_states)
        self._time[env_ids], self._qpos[env_ids], self._qvel[env_ids] = (
            state[:, 0],
            state[:, 1 : 1 + NQ],
            state[:, 1 + NQ :],
        )
        self._pending_states.clear()
        if not self._placed:
            return
        env_ids, applied = self._to_device({env_id: self._hold[e.parked].sum(0) for env_id, e in self._placed.items()})
        self._applied[env_ids] = applied
        poses = {env_id: e.fixtures for env_id, e in self._placed.items()}
        quaternions = {env_id: fixture_quaternions(fixtures) for env_id, fixtures in poses.items()}
        for part, values in zip(self._fixtures, (poses, quaternions), strict=True):
            part[env_ids] = self._to_device(values)[1][..., : part.shape[-1]]
        self._upload_appearances(env_ids)
        self._placed.clear()

    def _upload_appearances(self, env_ids: Tensor) -> None:
        values: dict[str, list[np.ndarray]] = {name: [] for name in _APPEARANCE_FIELDS}
        for layout in self._placed.values():
            self._appearance.apply(layout.appearance, layout.qpos, layout.fixtures)
            for name, column in values.items():
                column.append(getattr(self._appearance.model, name).copy())
        for name, column in values.items():
            self._appearance_arrays[name][env_ids] = torch.from_numpy(np.stack(column)).to(
                self._appearance_arrays[name]
            )

    def _to_device(self, by_env: dict[int, np.ndarray]) -> tuple[Tensor, Tensor]:
        env_ids = torch.tensor(list(by_env), device=self.device)
        return env_ids, torch.from_numpy(np.stack(list(by_env.values()))).to(self.device, torch.float32)

    def step(self, running: Bool[Tensor, " N"], controls: Float[Tensor, "N substeps nu"]) -> None:
        """Advance the ``running`` environments by one control step; ``controls``: actuator inputs of each substep.

        All environments are computed and the finished ones restored, which on a GPU is faster than selecting some.
        """
        self._upload()
        self._host = None
        state = (self._time[:, None], self._qpos, self._qvel)
        before = [part.clone() for part in state]
        self._warm_start.zero_()
        self._controls.copy_(controls.transpose(0, 1))
        self._advance()
        for part, old in zip(state, before, strict=True):
            part.copy_(torch.where(running[:, None], part, old))

    def render(self, env_ids: Sequence[int]) -> UInt8[Tensor, "n cameras height width 3"]:
        """Draw every environment and return copies of the images of ``env_ids``."""
        self._upload()
        self._draw()
        pixels = self._pixels.view(-1, len(self._cameras), *self._image_size, 4)
        chosen = (
            pixels if list(env_ids) == list(range(len(pixels))) else pixels[torch.tensor(env_ids, device=self.device)]
        )
        return chosen[..., :3].flip(-1)

    def close(self) -> None:
        """Nothing to release: arrays and graphs are freed with this object."""
