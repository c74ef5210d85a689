"""Physics and pictures from MuJoCo Warp, batched over rows on one device: a CUDA GPU, or the CPU where there is none.

Both devices run the same code: state, controls, appearance and pictures are torch views of Warp's arrays, and the ten
substeps and the drawing are each recorded once as a Warp graph and replayed. On CUDA no number leaves the GPU in
``step`` or ``render``. As in C MuJoCo, every control step starts the solver cold, so a row's future depends on its
state and inputs alone. Resets are collected on the host and uploaded together before they are first needed.
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

from sims.tabletop.episode import NQ, Episode, sample_episode
from sims.tabletop.mujoco_backend import SNAPSHOT_SIZE, holding_forces
from sims.tabletop.render import Appearance
from sims.tabletop.scene import SUBSTEPS, build_mjcf
from sims.tabletop.tasks import TASKS

CONTACTS = 48  # per row on average: one pool serves all rows; the experts need at most 20 at a time
CONSTRAINTS = 160  # of a row at most; the experts need 61
_log = logging.getLogger(__name__)
_LOOK_FIELDS = ("geom_rgba", "light_dir", "light_diffuse", "cam_pos", "cam_quat")


class WarpBackend:
    """``num_envs`` rows of the tabletop model on the current CUDA device, or on the CPU where torch sees none.

    The first one on a machine compiles its kernels, which takes minutes; Warp keeps them in its cache folder.
    """

    def __init__(self, *, num_envs: int, cameras: tuple[str, ...], image_size: tuple[int, int]) -> None:
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        self._cameras, self._image_size = cameras, image_size
        model = mujoco.MjModel.from_xml_string(build_mjcf())
        self._appearance, self._hold = Appearance(model), holding_forces(model)
        self._placed: dict[int, Episode] = {}
        self._stated: dict[int, np.ndarray] = {}
        self._host: np.ndarray | None = None
        wp.config.log_level = wp.LOG_WARNING  # Warp would print a line for each of its modules
        wp.init()
        cache = Path(str(wp.config.kernel_cache_dir))
        if not any(cache.glob("wp_*/*.sm*" if cuda else "wp_*/*.cpu*")):
            _log.warning("compiling the kernels of MuJoCo Warp into %s; this takes minutes, once", cache)
        with wp.ScopedDevice(wp.device_from_torch(self.device)):
            self._open(model, num_envs)

    def _open(self, model: mujoco.MjModel, num_envs: int) -> None:
        self._model = mjw.put_model(model, dict.fromkeys(_LOOK_FIELDS, num_envs))
        option = self._model.opt
        option.deterministic = True
        option.graph_conditional = wp.is_conditional_graph_supported()
        # A solver out of iterations is the accepted inaccuracy of this model; every other overflow prints a warning.
        option.warn_overflow &= ~(mjw.OverflowType.ITERATIONS | mjw.OverflowType.LS_ITERATIONS)
        start = mujoco.MjData(model)
        episode = sample_episode(next(iter(TASKS)), 0, split="train", look=0.0)
        start.qpos[:], start.mocap_pos[:] = episode.qpos, episode.fixtures
        self._data = data = mjw.put_data(model, start, nworld=num_envs, nconmax=CONTACTS, njmax=CONSTRAINTS)
        self._time, self._qpos, self._qvel = (wp.to_torch(a) for a in (data.time, data.qpos, data.qvel))
        self._warm_start = wp.to_torch(data.qacc_warmstart)
        self._applied, self._fixtures = wp.to_torch(data.qfrc_applied), wp.to_torch(data.mocap_pos)
        self._look = {name: wp.to_torch(getattr(self._model, name)) for name in _LOOK_FIELDS}
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
        """What draws the pictures, for the fingerprint."""
        return f"mujoco-warp {mjw.__version__} on {self.device.type}"

    @property
    def qpos(self) -> Float[Tensor, "N nq"]:
        """Generalized positions of every row (a copy), float64."""
        self._upload()
        return self._qpos.double()

    def place(self, row: int, episode: Episode) -> None:
        """Put ``row`` at the beginning of ``episode``, at rest."""
        state = np.zeros(SNAPSHOT_SIZE)
        state[1 : 1 + NQ] = episode.qpos
        self._placed[row] = episode
        self.restore(row, state)

    def snapshot(self, row: int) -> np.ndarray:
        """The physics state of a row, [SNAPSHOT_SIZE] float64 (of float32 precision)."""
        return self._download()[row].copy()

    def restore(self, row: int, snapshot: np.ndarray) -> None:
        """Inverse of ``snapshot``, after ``place`` of the same episode."""
        self._stated[row] = snapshot
        self._host = None

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of every row's physics state and of the inputs of its last substep, as those of C MuJoCo."""
        state = self._download().copy()
        inputs = [self._controls[-1], self._applied, self._fixtures.flatten(1)]
        return state, torch.cat(inputs, dim=1).double().cpu().numpy()

    def _download(self) -> np.ndarray:
        """The physics state of every row [N, SNAPSHOT_SIZE], copied to the host once per step."""
        self._upload()
        if self._host is None:
            self._host = torch.cat([self._time[:, None], self._qpos, self._qvel], dim=1).double().cpu().numpy()
        return self._host

    def _upload(self) -> None:
        """Bring the rows that were placed or restored since the last time to the device."""
        if not self._stated:
            return
        rows, state = self._to_device(self._stated)
        self._time[rows], self._qpos[rows], self._qvel[rows] = state[:, 0], state[:, 1 : 1 + NQ], state[:, 1 + NQ :]
        self._stated.clear()
        if not self._placed:
            return
        rows, applied = self._to_device({row: self._hold[e.parked].sum(0) for row, e in self._placed.items()})
        self._applied[rows] = applied
        self._fixtures[rows] = self._to_device({row: e.fixtures for row, e in self._placed.items()})[1]
        self._upload_looks(rows)
        self._placed.clear()

    def _upload_looks(self, rows: Tensor) -> None:
        values: dict[str, list[np.ndarray]] = {name: [] for name in _LOOK_FIELDS}
        for episode in self._placed.values():
            self._appearance.apply(episode.look, episode.qpos, episode.fixtures)
            for name, column in values.items():
                column.append(getattr(self._appearance.model, name).copy())
        for name, column in values.items():
            self._look[name][rows] = torch.from_numpy(np.stack(column)).to(self._look[name])

    def _to_device(self, by_row: dict[int, np.ndarray]) -> tuple[Tensor, Tensor]:
        rows = torch.tensor(list(by_row), device=self.device)
        return rows, torch.from_numpy(np.stack(list(by_row.values()))).to(self.device, torch.float32)

    def step(self, alive: Bool[Tensor, " N"], controls: Float[Tensor, "N substeps nu"]) -> None:
        """Advance the ``alive`` rows by one control step; ``controls`` are actuator inputs of each substep.

        All rows are computed, then the others get their state back: cheaper on a GPU than gathering the living.
        """
        self._upload()
        self._host = None
        state = (self._time[:, None], self._qpos, self._qvel)
        before = [part.clone() for part in state]
        self._warm_start.zero_()
        self._controls.copy_(controls.transpose(0, 1))
        self._advance()
        for part, old in zip(state, before, strict=True):
            part.copy_(torch.where(alive[:, None], part, old))

    def render(self, rows: Sequence[int]) -> UInt8[Tensor, "n cameras height width 3"]:
        """Draw every row and hand back copies of these."""
        self._upload()
        self._draw()
        pixels = self._pixels.view(-1, len(self._cameras), *self._image_size, 4)
        chosen = pixels if list(rows) == list(range(len(pixels))) else pixels[torch.tensor(rows, device=self.device)]
        return chosen[..., :3].flip(-1)

    def close(self) -> None:
        """Nothing to release: arrays and graphs go with this object."""
