"""Physics and pictures from C MuJoCo on CPU threads.

One row is one vector of MuJoCo's full physics state; ``mujoco.rollout`` advances all rows in native threads, each with
one scratch MjData. Every control step starts the solver cold, so a row's future depends on this vector and the inputs
alone: not on the thread that computes it, nor on what that thread computed before.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from mujoco.rollout import Rollout
from torch import Tensor

from sims.tabletop.episode import BLOCK_DOF, NQ, NV, PEG_DOF, Episode, Look
from sims.tabletop.render import Renderer, choose_gl
from sims.tabletop.scene import BLOCKS, MOCAP, NUM_BLOCKS, SUBSTEPS, build_mjcf

PHYSICS = int(mujoco.mjtState.mjSTATE_FULLPHYSICS)
INPUTS = int(mujoco.mjtState.mjSTATE_CTRL | mujoco.mjtState.mjSTATE_QFRC_APPLIED | mujoco.mjtState.mjSTATE_MOCAP_POS)
SNAPSHOT_SIZE = 1 + NQ + NV


def holding_forces(model: mujoco.MjModel) -> Float[np.ndarray, "objects nv"]:
    """Upward force on each free object (blocks, peg) that cancels its weight."""
    forces = np.zeros((NUM_BLOCKS + 1, NV))
    for i, name in enumerate((*BLOCKS, "peg")):
        dof = (BLOCK_DOF + 6 * i if i < NUM_BLOCKS else PEG_DOF) + 2
        forces[i, dof] = -model.opt.gravity[2] * model.body(name).mass[0]
    return forces


class MujocoBackend:
    """``num_envs`` rows of the tabletop model. Threads and GL contexts are released by ``close``."""

    device = torch.device("cpu")

    def __init__(
        self,
        *,
        num_envs: int,
        threads: int,
        cameras: tuple[str, ...],
        image_size: tuple[int, int],
        renderer: Literal["auto", "egl", "osmesa"],
    ) -> None:
        self._model = mujoco.MjModel.from_xml_string(build_mjcf())
        assert (self._model.nq, self._model.nv) == (NQ, NV)
        assert mujoco.mj_stateSize(self._model, PHYSICS) == SNAPSHOT_SIZE
        self._num_controls = self._model.nu
        self._state = np.zeros((num_envs, SNAPSHOT_SIZE))
        # Inputs of every substep: controls, applied forces (they hold parked objects up), fixture positions.
        self._inputs = np.zeros((num_envs, SUBSTEPS, mujoco.mj_stateSize(self._model, INPUTS)))
        self._trajectory = np.zeros((num_envs, SUBSTEPS, SNAPSHOT_SIZE))
        self._sensors = np.zeros((num_envs, SUBSTEPS, 0))
        self._data = [mujoco.MjData(self._model) for _ in range(threads)]
        self._rollout = Rollout(nthread=threads if threads > 1 else 0)
        self._hold = holding_forces(self._model)
        self._looks: list[Look | None] = [None] * num_envs
        self._cameras, self._image_size = cameras, image_size
        self._gl = choose_gl(renderer) if cameras else None
        self._renderers: list[tuple[ThreadPoolExecutor, Renderer]] = []
        self._threads = threads

    @property
    def renderer(self) -> str:
        """What draws the pictures, for the fingerprint."""
        return self._gl or "none"

    @property
    def qpos(self) -> Float[Tensor, "N nq"]:
        """Generalized positions of every row (a view that the next step overwrites), float64."""
        return torch.from_numpy(self._state[:, 1 : 1 + NQ])

    def place(self, row: int, episode: Episode) -> None:
        """Put ``row`` at the beginning of ``episode``, at rest."""
        self._state[row] = 0.0
        self._state[row, 1 : 1 + NQ] = episode.qpos
        nu = self._num_controls
        self._inputs[row, :, nu : nu + NV] = self._hold[episode.parked].sum(0)
        self._inputs[row, :, nu + NV :] = episode.fixtures.reshape(-1)
        self._looks[row] = episode.look

    def snapshot(self, row: int) -> np.ndarray:
        """The physics state of a row, [SNAPSHOT_SIZE] float64."""
        return self._state[row].copy()

    def restore(self, row: int, snapshot: np.ndarray) -> None:
        """Inverse of ``snapshot``, after ``place`` of the same episode."""
        self._state[row] = snapshot

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of every row's physics state and of the inputs of its last substep (specs PHYSICS and INPUTS)."""
        return self._state.copy(), self._inputs[:, -1].copy()

    def step(self, alive: Bool[Tensor, " N"], controls: Float[Tensor, "N substeps nu"]) -> None:
        """Advance the ``alive`` rows by one control step; ``controls`` are actuator inputs of each substep."""
        rows = alive.nonzero()[:, 0].numpy()
        n = len(rows)
        if n == 0:
            return
        everything = n == len(self._state)
        self._inputs[rows, :, : self._num_controls] = controls.numpy()[rows]
        start = self._state if everything else self._state[rows]
        inputs = self._inputs if everything else self._inputs[rows]
        trajectory = self._trajectory[:n]
        self._rollout.rollout(
            [self._model] * n,
            self._data,
            start,
            inputs,
            control_spec=INPUTS,
            skip_checks=True,
            nstep=SUBSTEPS,
            state=trajectory,
            sensordata=self._sensors[:n],
            chunk_size=max(1, n // (8 * self._threads)),
        )
        self._state[rows] = trajectory[:, -1]

    def render(self, rows: Sequence[int]) -> UInt8[Tensor, "n cameras height width 3"]:
        """Draw these rows; the rows are dealt to the threads, each with its own GL context and render model."""
        images = np.empty((len(rows), len(self._cameras), *self._image_size, 3), dtype=np.uint8)
        if not self._renderers:
            self._renderers = self._open_renderers()
        share = max(1, -(-len(rows) // len(self._renderers)))
        jobs = []
        for i, (thread, renderer) in enumerate(self._renderers):
            places = range(i * share, min((i + 1) * share, len(rows)))
            jobs.append(thread.submit(self._render_some, renderer, rows, places, images))
        for job in jobs:
            job.result()
        return torch.from_numpy(images)

    def _open_renderers(self) -> list[tuple[ThreadPoolExecutor, Renderer]]:
        assert self._gl is not None
        renderers = []
        for _ in range(self._threads):
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tabletop-render")
            opening = thread.submit(Renderer, gl=self._gl, cameras=self._cameras, image_size=self._image_size)
            renderers.append((thread, opening.result()))
        return renderers

    def _render_some(self, renderer: Renderer, rows: Sequence[int], places: range, images: np.ndarray) -> None:
        nu = self._num_controls
        for place in places:
            row = rows[place]
            look = self._looks[row]
            assert look is not None
            qpos = self._state[row, 1 : 1 + NQ]
            fixtures = self._inputs[row, 0, nu + NV :].reshape(len(MOCAP), 3)
            renderer.draw(qpos, fixtures, look, images[place])

    def close(self) -> None:
        """Stop the threads and free the GL contexts, each in the thread that owns it."""
        for thread, renderer in self._renderers:
            thread.submit(renderer.close).result()
            thread.shutdown()
        self._renderers = []
        self._rollout.close()
