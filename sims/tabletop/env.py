"""The tabletop suite as a VectorEnv.

Actions, as in LIBERO: position delta (1.0 = 5 cm), rotation delta as an axis-angle vector in the base frame
(1.0 = 0.5 rad), gripper (-1 open, +1 closed, linear between). The deltas move a *target pose* that the arm follows; the
target never leads the tool by more than the leash, so a blocked arm does not wind up. State: tool position [m],
orientation axis-angle [rad] (the branch near (pi, 0, 0)), finger positions (q, -q) [m].
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import mujoco
import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from sims.errors import UserError
from sims.tabletop.config import TabletopConfig
from sims.tabletop.episode import ARM, BLOCK_QPOS, DRAWER_QPOS, FINGERS, PEG_QPOS, Episode, sample_episode
from sims.tabletop.expert import ScriptedExpert
from sims.tabletop.kinematics import tool_orientation
from sims.tabletop.mujoco_backend import SNAPSHOT_SIZE, MujocoBackend
from sims.tabletop.scene import CONTROL_HZ, LAG_S, MOCAP, SUBSTEPS, model_hash
from sims.tabletop.tasks import TASKS, Scene, outcome
from sims.tabletop.tool_control import ToolControl, ToolState, ToolTarget, finger_target
from sims.vector_env import EnvSpec, Observation, StartState, Step, encode_instructions, update_instructions

if TYPE_CHECKING:
    from sims.tabletop.warp_backend import WarpBackend


@dataclass
class _Clock:
    """Per-row progress of the episodes, [N] each."""

    elapsed: Tensor
    terminated: Tensor
    truncated: Tensor
    success: Tensor


class TabletopEnv:
    """N tabletop episodes; rows are unusable until their first reset."""

    def __init__(self, config: TabletopConfig) -> None:
        self.config = config
        self.backend = _open_backend(config)
        device, n = self.backend.device, config.num_envs
        self._control = ToolControl(device)
        limits = [config.max_steps or TASKS[name].max_steps for name in config.tasks]
        self._limits = torch.tensor(limits, device=device)
        self.spec = EnvSpec(
            name="tabletop",
            num_envs=n,
            action_dim=7,
            state_dim=8,
            cameras=config.cameras,
            image_size=config.image_size,
            control_hz=CONTROL_HZ,
            max_steps=max(limits),
            tasks=config.tasks,
            device=device,
            fingerprint={
                "mujoco": mujoco.__version__,
                "model": model_hash(),
                "backend": config.backend,
                "renderer": self.backend.renderer,
            },
        )
        self._starts: list[StartState | None] = [None] * n
        self._task = torch.zeros(n, dtype=torch.int64, device=device)
        self._candidate = torch.zeros(n, dtype=torch.int64, device=device)
        self._fixtures = torch.zeros(n, len(MOCAP), 3, device=device)
        self._instruction = encode_instructions([""] * n).to(device)
        flags = torch.zeros(n, dtype=torch.bool, device=device)
        self._clock = _Clock(
            elapsed=torch.zeros(n, dtype=torch.int64, device=device),
            terminated=~flags,  # before its first reset a row stands finished
            truncated=flags.clone(),
            success=flags.clone(),
        )
        self._target = ToolTarget(
            position=torch.zeros(n, 3, device=device),
            rotation=torch.zeros(n, 3, 3, device=device),
            joints=torch.zeros(n, 7, device=device),
        )
        self._progress = torch.zeros(n, device=device)
        self._task_rows: list[tuple[str, Tensor]] = []
        self._look_at_state()

    # Episodes

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """Start row ``env_ids[i]`` at ``start[i]``; ``start[i].task`` indexes ``spec.tasks``."""
        rows = list(range(self.spec.num_envs)) if env_ids is None else list(env_ids)
        if len(rows) != len(start):
            raise ValueError(f"reset: {len(rows)} rows but {len(start)} start states; give one for each row")
        episodes = [self._sample(state) for state in start]
        clock = self._clock
        clock.elapsed[rows] = 0
        for flag in (clock.terminated, clock.truncated, clock.success):
            flag[rows] = False
        self._task[rows] = torch.tensor([state.task for state in start], device=self.spec.device)
        self._candidate[rows] = torch.tensor([e.candidate for e in episodes], device=self.spec.device)
        self._fixtures[rows] = torch.from_numpy(np.stack([e.fixtures for e in episodes])).to(self._fixtures)
        instructions = encode_instructions([e.instruction for e in episodes])
        self._instruction = update_instructions(self._instruction, rows, instructions)
        for row, state, episode in zip(rows, start, episodes, strict=True):
            self.backend.place(row, episode)
            self._starts[row] = state
            if state.snapshot is not None:
                self._restore(row, state.snapshot)
        self._task_rows = [(name, (self._task == i).nonzero()[:, 0]) for i, name in enumerate(self.spec.tasks)]
        self._look_at_state()
        fresh = [row for row, state in zip(rows, start, strict=True) if state.snapshot is None]
        self._target.position[fresh] = self._scene.tool[fresh]
        self._target.rotation[fresh] = self._scene.rotation[fresh]
        self._target.joints[fresh] = self._joints[fresh].float()
        if self.config.reward == "shaped":
            self._progress = self._measure_progress()

    def _sample(self, state: StartState) -> Episode:
        if not 0 <= state.task < len(self.spec.tasks):
            raise ValueError(f"reset: task {state.task} is not in 0..{len(self.spec.tasks) - 1} ({self.spec.tasks})")
        name = self.spec.tasks[state.task]
        return sample_episode(name, state.seed, split=self.config.split, look=self.config.look)

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """Snapshots: [physics state, target position and rotation, joint reference, elapsed, the three flags]."""
        rows = range(self.spec.num_envs) if env_ids is None else env_ids
        clock = self._clock
        states = []
        for row in rows:
            start = self._starts[row]
            if start is None:
                raise RuntimeError(f"capture: row {row} was never reset")
            flags = [clock.elapsed[row], clock.terminated[row], clock.truncated[row], clock.success[row]]
            target = torch.cat([part[row].flatten() for part in vars(self._target).values()])
            numbers = [*target.tolist(), *(float(flag) for flag in flags)]
            snapshot = np.concatenate([self.backend.snapshot(row), numbers])
            states.append(dataclasses.replace(start, snapshot=snapshot))
        return tuple(states)

    def _restore(self, row: int, snapshot: np.ndarray) -> None:
        if snapshot.shape != (SNAPSHOT_SIZE + 23,):
            raise ValueError(f"reset: a snapshot of this suite has {SNAPSHOT_SIZE + 23} numbers, got {snapshot.shape}")
        self.backend.restore(row, snapshot[:SNAPSHOT_SIZE])
        rest = snapshot[SNAPSHOT_SIZE:]
        self._target.position[row] = torch.from_numpy(rest[:3])
        self._target.rotation[row] = torch.from_numpy(rest[3:12].reshape(3, 3))
        self._target.joints[row] = torch.from_numpy(rest[12:19])
        clock = self._clock
        clock.elapsed[row] = int(rest[19])
        clock.terminated[row], clock.truncated[row], clock.success[row] = (bool(flag) for flag in rest[20:])

    # Steps

    def step(self, action: Float[Tensor, "N 7"]) -> Step:
        """One control step of 50 ms. Sparse reward: 1 on success; achieving what was not asked for ends without it."""
        clock = self._clock
        done = clock.terminated | clock.truncated
        alive = ~done
        controls = self._controls(action.to(self._target.position), alive)
        self.backend.step(alive, controls)
        self._look_at_state()
        success, ended = self._outcomes()
        clock.elapsed += alive
        clock.success |= success & alive
        clock.terminated |= ended & alive
        clock.truncated |= alive & ~clock.terminated & (clock.elapsed >= self._limits[self._task])
        return Step(
            reward=self._reward(alive),
            terminated=clock.terminated.clone(),
            truncated=clock.truncated.clone(),
            success=clock.success.clone(),
            intervened=torch.zeros_like(done),
        )

    def _controls(self, action: Tensor, alive: Tensor) -> Float[Tensor, "N substeps 9"]:
        """Move the targets of the living rows and turn them into actuator inputs, ramped over the substeps."""
        action = action.clamp(-1, 1)
        last, scene = self._target, self._scene
        tool = ToolState(position=scene.tool, rotation=scene.rotation, joints=self._joints, jacobian=self._jacobian)
        target = self._control.next_target(last, action, tool)
        motion = target.joints - last.joints
        ramp = (torch.arange(1, SUBSTEPS + 1, device=motion.device) / SUBSTEPS)[None, :, None]
        ahead = LAG_S * CONTROL_HZ  # cancels the lag that the actuators' damping causes at constant speed
        joints = last.joints[:, None] + motion[:, None] * (ramp + ahead)
        self._target = ToolTarget(
            position=torch.where(alive[:, None], target.position, last.position),
            rotation=torch.where(alive[:, None, None], target.rotation, last.rotation),
            joints=torch.where(alive[:, None], target.joints, last.joints),
        )
        fingers = finger_target(action[:, 6])
        return torch.cat([joints.float(), fingers[:, None, None].expand(-1, SUBSTEPS, 2)], dim=2)

    def _look_at_state(self) -> None:
        """Read the simulator: the scene that tasks, expert and observations share."""
        qpos = self.backend.qpos
        self._joints = qpos[:, ARM].clone()
        position, rotation, self._jacobian = self._control.panda.forward(self._joints)
        single = qpos.float()
        self._scene = Scene(
            tool=position.float(),
            rotation=rotation.float(),
            fingers=single[:, FINGERS],
            blocks=single[:, BLOCK_QPOS].view(-1, 3, 7),
            peg=single[:, PEG_QPOS],
            drawers=single[:, DRAWER_QPOS],
            fixtures=self._fixtures,
        )

    def _outcomes(self) -> tuple[Tensor, Tensor]:
        if len(self._task_rows) == 1:
            return outcome(TASKS[self._task_rows[0][0]], self._scene, self._candidate)
        success = torch.zeros_like(self._clock.success)
        ended = torch.zeros_like(success)
        for name, rows in self._task_rows:
            success[rows], ended[rows] = outcome(TASKS[name], self._scene[rows], self._candidate[rows])
        return success, ended

    def _measure_progress(self) -> Float[Tensor, " N"]:
        progress = torch.zeros_like(self._progress)
        for name, rows in self._task_rows:
            candidates = TASKS[name].progress(self._scene[rows])
            progress[rows] = candidates.gather(1, self._candidate[rows, None])[:, 0]
        return progress

    def _reward(self, alive: Tensor) -> Float[Tensor, " N"]:
        """Sparse: success. Shaped: success plus the gain in progress of this step."""
        reward = (self._clock.success & alive).float()
        if self.config.reward == "shaped":
            progress = self._measure_progress()
            reward = reward + torch.where(alive, progress - self._progress, 0.0)
            self._progress = progress
        return reward

    # Looks

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """Images, state and words of these rows. Without cameras no rendering context is ever opened."""
        rows = list(range(self.spec.num_envs)) if env_ids is None else list(env_ids)
        scene = self._scene
        fingers = scene.fingers * scene.fingers.new_tensor([1.0, -1.0])
        state = torch.cat([scene.tool, tool_orientation(scene.rotation.double()).float(), fingers], dim=1)
        if self.spec.cameras:
            images = self.backend.render(rows)
        else:
            images = torch.zeros(len(rows), 0, *self.spec.image_size, 3, dtype=torch.uint8, device=self.spec.device)
        return Observation(images=images, state=state[rows], instruction=self._instruction[rows])

    def expert(self, *, noise: float, seed: int) -> ScriptedExpert:
        """The scripted demonstrator; ``noise`` 1 is a mediocre operator (see ScriptedExpert)."""
        return ScriptedExpert(self, noise=noise, seed=seed)

    @property
    def scene(self) -> Scene:
        """What the simulator's state is now, for experts and measurements; policies do not see it."""
        return self._scene

    @property
    def task_rows(self) -> list[tuple[str, Tensor]]:
        """The rows that are at each task."""
        return self._task_rows

    @property
    def candidate(self) -> Int[Tensor, " N"]:
        """Which candidate each row's instruction names."""
        return self._candidate

    @property
    def target(self) -> tuple[Float[Tensor, "N 3"], Float[Tensor, "N 3 3"]]:
        """The pose that the arm follows, which actions move."""
        return self._target.position, self._target.rotation

    @property
    def elapsed(self) -> Int[Tensor, " N"]:
        """Control steps of each episode so far."""
        return self._clock.elapsed

    def close(self) -> None:
        """Release threads and rendering contexts."""
        self.backend.close()


def _open_backend(config: TabletopConfig) -> MujocoBackend | WarpBackend:
    if config.backend == "warp":
        try:
            from sims.tabletop.warp_backend import WarpBackend
        except ModuleNotFoundError as error:
            message = f"backend='warp' needs {error.name}, which is not installed. Run: pip install 'vla-rl[warp]'"
            raise UserError(message) from error
        return WarpBackend(num_envs=config.num_envs, cameras=config.cameras, image_size=config.image_size)
    return MujocoBackend(
        num_envs=config.num_envs,
        threads=config.threads or len(os.sched_getaffinity(0)),
        cameras=config.cameras,
        image_size=config.image_size,
        renderer=config.renderer,
    )
