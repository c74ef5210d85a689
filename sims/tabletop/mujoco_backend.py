"""Physics and images from C MuJoCo on CPU threads.

The state of an environment is one vector of MuJoCo's full physics state; ``mujoco.rollout`` advances all environments
in native threads, each with one MjData as working memory. Every control step starts the solver without warm start, so
an environment's future depends on this vector and the inputs alone, and not on the thread that computes it.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Literal

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from mujoco.rollout import Rollout
from torch import Tensor

from sims.tabletop.layout import BLOCK_DOF, NQ, NV, PEG_DOF, Layout, fixture_quaternions
from sims.tabletop.render import Detail, Renderer, choose_gl
from sims.tabletop.scene import BLOCKS, NUM_BLOCKS, SUBSTEPS, build_mjcf

PHYSICS = int(mujoco.mjtState.mjSTATE_FULLPHYSICS)
_STATE = mujoco.mjtState
INPUTS = int(_STATE.mjSTATE_CTRL | _STATE.mjSTATE_QFRC_APPLIED | _STATE.mjSTATE_MOCAP_POS | _STATE.mjSTATE_MOCAP_QUAT)
SNAPSHOT_SIZE = 1 + NQ + NV


def holding_forces(model: mujoco.MjModel) -> Float[np.ndarray, "objects nv"]:
    """Upward force on each free object (blocks, peg) that cancels its weight."""
    forces = np.zeros((NUM_BLOCKS + 1, NV))
    for i, name in enumerate((*BLOCKS, "peg")):
        dof = (BLOCK_DOF + 6 * i if i < NUM_BLOCKS else PEG_DOF) + 2
        forces[i, dof] = -model.opt.gravity[2] * model.body(name).mass[0]
    return forces


class MujocoBackend:
    """``num_envs`` copies of the tabletop model. ``close`` releases threads and GL contexts."""

    device = torch.device("cpu")

    def __init__(
        self,
        *,
        num_envs: int,
        threads: int,
        cameras: tuple[str, ...],
        image_size: tuple[int, int],
        renderer: Literal["auto", "egl", "osmesa"],
        shadows: bool,
        detail: Detail,
    ) -> None:
        self._model = mujoco.MjModel.from_xml_string(build_mjcf())
        assert (self._model.nq, self._model.nv) == (NQ, NV)
        assert mujoco.mj_stateSize(self._model, PHYSICS) == SNAPSHOT_SIZE
        self._num_controls = self._model.nu
        self._state = np.zeros((num_envs, SNAPSHOT_SIZE))
        self._qpos = torch.from_numpy(self._state[:, 1 : 1 + NQ])
        # Inputs of every substep: controls, applied forces (against the weight of parked objects), fixture poses.
        self._inputs = np.zeros((num_envs, SUBSTEPS, mujoco.mj_stateSize(self._model, INPUTS)))
        self._trajectory = np.zeros((num_envs, SUBSTEPS, SNAPSHOT_SIZE))
        self._sensors = np.zeros((num_envs, SUBSTEPS, 0))
        self._data = [mujoco.MjData(self._model) for _ in range(threads)]
        self._rollout = Rollout(nthread=threads if threads > 1 else 0)
        self._hold = holding_forces(self._model)
        self._layouts: list[Layout | None] = [None] * num_envs
        self._cameras, self._image_size = cameras, image_size
        self._gl = choose_gl(renderer) if cameras else None
        self._make_renderer = partial(Renderer, cameras=cameras, image_size=image_size, shadows=shadows, detail=detail)
        self._renderers: list[tuple[ThreadPoolExecutor, Renderer]] = []
        self._threads = threads

    @property
    def renderer(self) -> str:
        """Name of the renderer, for the fingerprint."""
        return self._gl or "none"

    @property
    def qpos(self) -> Float[Tensor, "N nq"]:
        """Generalized positions of every environment (a view that the next step overwrites), float64."""
        return self._qpos

    def place(self, env_id: int, layout: Layout) -> None:
        """Put an environment into the initial state of ``layout``, at rest."""
        self._state[env_id] = 0.0
        self._state[env_id, 1 : 1 + NQ] = layout.qpos
        nu = self._num_controls
        self._inputs[env_id, :, nu : nu + NV] = self._hold[layout.parked].sum(0)
        fixtures = layout.fixtures
        poses = (fixtures[:, :3].reshape(-1), fixture_quaternions(fixtures).reshape(-1))
        self._inputs[env_id, :, nu + NV :] = np.concatenate(poses)
        self._layouts[env_id] = layout

    def snapshot(self, env_id: int) -> np.ndarray:
        """The physics state of an environment, [SNAPSHOT_SIZE] float64."""
        return self._state[env_id].copy()

    def restore(self, env_id: int, snapshot: np.ndarray) -> None:
        """Inverse of ``snapshot``, after ``place`` of the same layout."""
        self._state[env_id] = snapshot

    def export(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of every environment's physics state and of the inputs of its last substep (PHYSICS, INPUTS)."""
        return self._state.copy(), self._inputs[:, -1].copy()

    def step(self, running: Bool[Tensor, " N"], controls: Float[Tensor, "N substeps nu"]) -> None:
        """Advance the ``running`` environments by one control step; ``controls``: actuator inputs of each substep."""
        env_ids = running.numpy().nonzero()[0]
        n = len(env_ids)
        if n == 0:
            return
        chosen = env_ids if n < len(self._state) else slice(None)  # a slice, of all of them, copies nothing
        self._inputs[chosen, :, : self._num_controls] = controls.numpy()[chosen]
        trajectory = self._trajectory[:n]
        self._rollout.rollout(
            [self._model] * n,
            self._data,
            self._state[chosen],
            self._inputs[chosen],
            control_spec=INPUTS,
            skip_checks=True,
            nstep=SUBSTEPS,
            state=trajectory,
            sensordata=self._sensors[:n],
            chunk_size=max(1, n // (8 * self._threads)),
        )
        self._state[chosen] = trajectory[:, -1]

    def render(self, env_ids: Sequence[int]) -> UInt8[Tensor, "n cameras height width 3"]:
        """Draw these environments, distributed over the threads, each with its own GL context and model."""
        images = np.empty((len(env_ids), len(self._cameras), *self._image_size, 3), dtype=np.uint8)
        if not self._renderers:
            self._renderers = self._open_renderers()
        share = max(1, -(-len(env_ids) // len(self._renderers)))
        jobs = []
        for i, (thread, renderer) in enumerate(self._renderers):
            places = range(i * share, min((i + 1) * share, len(env_ids)))
            jobs.append(thread.submit(self._render_some, renderer, env_ids, places, images))
        for job in jobs:
            job.result()
        return torch.from_numpy(images)

    def _open_renderers(self) -> list[tuple[ThreadPoolExecutor, Renderer]]:
        assert self._gl is not None
        renderers = []
        for _ in range(self._threads):
            thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tabletop-render")
            renderers.append((thread, thread.submit(self._make_renderer, gl=self._gl).result()))
        return renderers

    def _render_some(self, renderer: Renderer, env_ids: Sequence[int], places: range, images: np.ndarray) -> None:
        for place in places:
            env_id = env_ids[place]
            layout = self._layouts[env_id]
            assert layout is not None
            qpos = self._state[env_id, 1 : 1 + NQ]
            renderer.draw(qpos, layout.fixtures, layout.appearance, images[place])

    def close(self) -> None:
        """Stop the threads and free the GL contexts, each in the thread that owns it."""
        for thread, renderer in self._renderers:
            thread.submit(renderer.close).result()
            thread.shutdown()
        self._renderers = []
        self._rollout.close()
