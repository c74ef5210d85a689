"""The tabletop suite as a VectorEnv.

Actions, as in LIBERO: position delta (1.0 = 5 cm), rotation delta as an axis-angle vector in the base frame
(1.0 = 0.5 rad), gripper (-1 open, +1 closed, linear between). The deltas move a *target pose* that the arm follows (see
end_effector_control.py). State: end-effector position [m], its orientation as axis-angle [rad] (on the branch near
(pi, 0, 0)), finger positions (q, -q) [m].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import mujoco
import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.devices.constant import constant
from sims.subproc.single_env import reward_fingerprint
from sims.tabletop.backend import open_backend
from sims.tabletop.config import TabletopConfig
from sims.tabletop.demonstrators.registry import DEMONSTRATORS, Demonstrator
from sims.tabletop.end_effector_control import (
    POSITION_SCALE,
    ROTATION_SCALE,
    WORKSPACE,
    EndEffectorControl,
    EndEffectorState,
    EndEffectorTarget,
    finger_target,
)
from sims.tabletop.kinematics import end_effector_orientation, rotation_matrix
from sims.tabletop.layout import ARM, Layout, sample_layout, scene_state
from sims.tabletop.limited_motion import LimitedMotion
from sims.tabletop.mujoco_backend import SNAPSHOT_SIZE
from sims.tabletop.projection import Projection
from sims.tabletop.scene import CONTROL_HZ, LAG_S, MOCAP, SUBSTEPS, model_hash
from sims.tabletop.scene_state import SceneState
from sims.tabletop.task import HOLD_STEPS, check_task
from sims.tabletop.tasks.registry import all_tasks
from sims.vector_env import EnvSpec, Observation, StartState, Step, encode_instructions, update_instructions


@dataclass
class _Progress:
    """Progress of the episodes."""

    elapsed: Int[Tensor, " N"]  # control steps
    named_held: Int[Tensor, " N"]  # control steps for which the named candidate alone has been achieved
    other_held: Int[Tensor, " N"]  # the same of any other candidate
    terminated: Bool[Tensor, " N"]
    truncated: Bool[Tensor, " N"]
    success: Bool[Tensor, " N"]

    @classmethod
    def ended(cls, num_envs: int, device: torch.device) -> _Progress:
        def zeros(dtype: torch.dtype) -> Tensor:
            return torch.zeros(num_envs, dtype=dtype, device=device)

        return _Progress(
            elapsed=zeros(torch.int64),
            named_held=zeros(torch.int64),
            other_held=zeros(torch.int64),
            terminated=~zeros(torch.bool),
            truncated=zeros(torch.bool),
            success=zeros(torch.bool),
        )


class TabletopEnv:
    """N tabletop episodes. An environment cannot be used before its first reset."""

    def __init__(self, config: TabletopConfig) -> None:
        self.config = config
        self.backend = open_backend(config)
        device, n = self.backend.device, config.num_envs
        self._control = EndEffectorControl(device)
        limits = [config.max_steps or all_tasks()[name].max_steps for name in config.tasks]
        self._limits = torch.tensor(limits, device=device)  # of each task
        ramp = (torch.arange(1, SUBSTEPS + 1, device=device) / SUBSTEPS)[None, :, None]
        self._ramp = ramp + LAG_S * CONTROL_HZ  # ahead by the lag of the damped actuators at constant speed
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
                **reward_fingerprint(config),
            },
            action_delay=config.action_delay,
            task_limits=tuple(limits),
        )
        self._starts: list[StartState | None] = [None] * n
        self._layouts: list[Layout | None] = [None] * n
        self._projection: Projection | None = None
        self._task = torch.zeros(n, dtype=torch.int64, device=device)
        self._max_steps = self._limits[self._task]
        self._candidate = torch.zeros(n, dtype=torch.int64, device=device)
        self._fixtures = torch.zeros(n, len(MOCAP), 4, device=device)
        self._instruction = encode_instructions([""] * n).to(device)
        self._progress = _Progress.ended(n, device)  # before its first reset
        self._target = EndEffectorTarget(
            position=torch.zeros(n, 3, device=device),
            rotation=torch.zeros(n, 3, 3, device=device),
            joints=torch.zeros(n, 7, device=device),
        )
        self._pending = torch.zeros(n, config.action_delay, 7, device=device)  # actions that are not yet executed
        self._motion = LimitedMotion(n, device) if config.acceleration_limits else None
        self._task_progress = torch.zeros(n, device=device)  # of the shaped reward
        self._task_envs: list[tuple[str, Tensor]] = []
        self._read_state()

    # -- episodes -------------------------------------------------------------------------------------------------

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """Start environment ``env_ids[i]`` at ``start[i]``; ``start[i].task`` is an index into ``spec.tasks``."""
        ids = self.spec.ids(env_ids)
        if len(ids) != len(start):
            raise ValueError(f"reset: {len(ids)} environments but {len(start)} start states; give one for each")
        if not ids:
            return
        layouts = [self._sample(state) for state in start]
        progress = self._progress
        for part in vars(progress).values():
            part[ids] = 0
        self._task[ids] = torch.tensor([state.task for state in start], device=self.spec.device)
        self._candidate[ids] = torch.tensor([layout.candidate for layout in layouts], device=self.spec.device)
        self._fixtures[ids] = torch.from_numpy(np.stack([layout.fixtures for layout in layouts])).to(self._fixtures)
        instructions = encode_instructions([layout.instruction for layout in layouts])
        self._instruction = update_instructions(self._instruction, ids, instructions)
        for env_id, state, layout in zip(ids, start, layouts, strict=True):
            self.backend.place(env_id, layout)
            self._layouts[env_id] = layout
            self._starts[env_id] = state
            if state.snapshot is not None:
                self._restore(env_id, state.snapshot)
        self._max_steps = self._limits[self._task]
        self._task_envs = [(name, (self._task == i).nonzero()[:, 0]) for i, name in enumerate(self.spec.tasks)]
        self._read_state()
        new = [env_id for env_id, state in zip(ids, start, strict=True) if state.snapshot is None]
        self._target.position[new] = self._scene.end_effector[new]
        self._target.rotation[new] = self._scene.rotation[new]
        self._target.joints[new] = self._joints[new].float()
        self._pending[new] = torch.tensor([0.0] * 6 + [-1.0], device=self.spec.device)
        if self._motion is not None:
            self._motion.start(new, torch.cat([self._target.joints, self._scene.fingers[:, :1].abs()], dim=1)[new])
        if self.config.reward == "shaped":
            self._task_progress = self._measure_task_progress()

    def _sample(self, state: StartState) -> Layout:
        if not 0 <= state.task < len(self.spec.tasks):
            raise ValueError(f"reset: task {state.task} is not in 0..{len(self.spec.tasks) - 1} ({self.spec.tasks})")
        name = self.spec.tasks[state.task]
        return sample_layout(name, state.seed, split=self.config.split, appearance=self.config.appearance)

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """Snapshots: [physics state, and what ``_memory`` lists]."""
        states = []
        for env_id in self.spec.ids(env_ids):
            start = self._starts[env_id]
            if start is None:
                raise RuntimeError(f"capture: environment {env_id} was never reset")
            numbers = [part[env_id].flatten().tolist() for part in self._memory()]
            snapshot = np.concatenate([self.backend.snapshot(env_id), *numbers])
            states.append(dataclasses.replace(start, snapshot=snapshot))
        return tuple(states)

    def _restore(self, env_id: int, snapshot: np.ndarray) -> None:
        sizes = [part[env_id].numel() for part in self._memory()]
        size = SNAPSHOT_SIZE + sum(sizes)
        if snapshot.shape != (size,):
            raise ValueError(f"reset: a snapshot of this suite has {size} numbers, got {snapshot.shape}")
        self.backend.restore(env_id, snapshot[:SNAPSHOT_SIZE])
        numbers = torch.from_numpy(snapshot[SNAPSHOT_SIZE:]).split(sizes)
        for part, saved in zip(self._memory(), numbers, strict=True):
            part[env_id] = saved.view(part[env_id].shape)

    def _memory(self) -> list[Tensor]:
        """What the episodes depend on beside the physics, each [N, ...], in the order of a snapshot."""
        motion = [] if self._motion is None else [self._motion.state]
        return [*vars(self._target).values(), *vars(self._progress).values(), self._pending, *motion]

    # -- steps ----------------------------------------------------------------------------------------------------

    def step(self, action: Float[Tensor, "N 7"]) -> Step:
        """One control step of 50 ms. Sparse reward: 1 on success; holding another candidate ends without it."""
        progress = self._progress
        finished = progress.terminated | progress.truncated
        running = ~finished
        controls = self._controls(self._due(action.to(self._target.position).clamp(-1, 1), running), running)
        self.backend.step(running, controls)
        self._read_state()
        named, other = self._check_tasks()
        progress.elapsed += running
        progress.named_held = torch.where(running, (progress.named_held + 1) * named, progress.named_held)
        progress.other_held = torch.where(running, (progress.other_held + 1) * other, progress.other_held)
        progress.success |= progress.named_held >= HOLD_STEPS
        progress.terminated |= progress.success | (progress.other_held >= HOLD_STEPS)
        progress.truncated |= running & ~progress.terminated & (progress.elapsed >= self._max_steps)
        return Step(
            reward=self._reward(running),
            terminated=progress.terminated.clone(),
            truncated=progress.truncated.clone(),
            success=progress.success.clone(),
            intervened=torch.zeros_like(finished),
        )

    def _due(self, action: Float[Tensor, "N 7"], running: Bool[Tensor, " N"]) -> Float[Tensor, "N 7"]:
        """The action of ``action_delay`` control steps ago; ``action`` waits."""
        if not self.config.action_delay:
            return action
        queue = torch.cat([self._pending, action[:, None]], dim=1)
        self._pending = torch.where(running[:, None, None], queue[:, 1:], self._pending)
        return queue[:, 0]

    def _controls(self, action: Float[Tensor, "N 7"], running: Bool[Tensor, " N"]) -> Float[Tensor, "N substeps 9"]:
        """Move the targets of running environments and return the actuator inputs, interpolated over the substeps."""
        last, scene = self._target, self._scene
        arm = EndEffectorState(
            position=scene.end_effector, rotation=scene.rotation, joints=self._joints, jacobian=self._jacobian
        )
        target = self._control.next_target(last, action, arm)
        self._target = target.where(running, last)
        fingers = finger_target(action[:, 6])
        if self._motion is not None:
            sent = self._motion.follow(running, torch.cat([target.joints, fingers[:, None]], dim=1))
            return torch.cat([sent, sent[..., -1:]], dim=2)
        motion = target.joints - last.joints
        joints = last.joints[:, None] + motion[:, None] * self._ramp
        return torch.cat([joints.float(), fingers[:, None, None].expand(-1, SUBSTEPS, 2)], dim=2)

    def _read_state(self) -> None:
        """Update ``scene``, the state that tasks, expert and observations share, from the simulator."""
        qpos = self.backend.qpos
        self._joints = qpos[:, ARM].clone()
        position, rotation, self._jacobian = self._control.panda.forward(self._joints)
        self._scene = scene_state(qpos, self._fixtures, position, rotation)

    def _check_tasks(self) -> tuple[Bool[Tensor, " N"], Bool[Tensor, " N"]]:
        """(named, other) of every environment; see ``check_task``."""
        if len(self._task_envs) == 1:
            return check_task(all_tasks()[self._task_envs[0][0]], self._scene, self._candidate)
        named = torch.zeros_like(self._progress.success)
        other = torch.zeros_like(named)
        for name, ids in self._task_envs:
            named[ids], other[ids] = check_task(all_tasks()[name], self._scene[ids], self._candidate[ids])
        return named, other

    def _measure_task_progress(self) -> Float[Tensor, " N"]:
        progress = torch.zeros_like(self._task_progress)
        for name, ids in self._task_envs:
            candidates = all_tasks()[name].progress(self._scene[ids])
            progress[ids] = candidates.gather(1, self._candidate[ids, None])[:, 0]
        return progress

    def _reward(self, running: Bool[Tensor, " N"]) -> Float[Tensor, " N"]:
        """Sparse: success. Shaped: success plus the increase of the task's progress in this step."""
        reward = (self._progress.success & running).float()
        if self.config.reward == "shaped":
            progress = self._measure_task_progress()
            reward = reward + torch.where(running, progress - self._task_progress, 0.0)
            self._task_progress = progress
        return reward

    # -- observations ---------------------------------------------------------------------------------------------

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """Images, state and instruction. Without cameras no rendering context is opened."""
        scene = self._scene
        fingers = scene.fingers * constant((1.0, -1.0), scene.fingers)
        orientation = end_effector_orientation(scene.rotation.double()).float()
        state, instruction = torch.cat([scene.end_effector, orientation, fingers], dim=1), self._instruction
        ids = self.spec.ids(env_ids)
        if env_ids is not None:
            state, instruction = state[ids], instruction[ids]
        if self.spec.cameras:
            images = self.backend.render(ids)
        else:
            images = torch.zeros(len(ids), 0, *self.spec.image_size, 3, dtype=torch.uint8, device=self.spec.device)
        return Observation(images=images, state=state, instruction=instruction)

    def expert(self, *, noise: float, seed: int) -> Demonstrator:
        """The demonstrator that the configuration names; ``noise`` 0 is the best it can do, 1 fails often."""
        return DEMONSTRATORS[self.config.demonstrator](self, noise=noise, seed=seed)

    def end_effector(self, env_id: int) -> Float[np.ndarray, " 3"]:
        """Present position [m]."""
        return self._scene.end_effector[env_id].cpu().numpy()

    def planned_path(self, env_id: int, actions: Float[np.ndarray, "n 7"]) -> Float[np.ndarray, "n_plus_1 3"]:
        """The end effector, then the target positions of these actions [m], which the arm follows with a lag."""
        positions = [self.end_effector(env_id)]
        target = self.target[0][env_id].cpu().numpy()
        for action in np.clip(actions, -1.0, 1.0):
            target = np.clip(target + POSITION_SCALE * action[:3], *WORKSPACE)
            positions.append(target)
        return np.stack(positions)

    def project(self, env_id: int, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "cameras n 2"]:
        """(right, down) as shares of each image's width and height, seen now; NaN behind the camera."""
        if self._projection is None:
            self._projection = Projection(self.spec.cameras, self.spec.image_size)
        layout = self._layouts[env_id]
        if layout is None:
            raise RuntimeError(f"project: environment {env_id} was never reset")
        qpos = self.backend.qpos[env_id].cpu().numpy()
        return self._projection(points, qpos, layout.fixtures, layout.appearance)

    @property
    def scene(self) -> SceneState:
        """The simulator's present state, for experts and measurements; policies do not see it."""
        return self._scene

    @property
    def task_envs(self) -> list[tuple[str, Tensor]]:
        """The indices of the environments of each task."""
        return self._task_envs

    @property
    def candidate(self) -> Int[Tensor, " N"]:
        """The candidate that each environment's instruction names."""
        return self._candidate

    @property
    def target(self) -> tuple[Float[Tensor, "N 3"], Float[Tensor, "N 3 3"]]:
        """Position and rotation of the target pose, which actions move and the arm follows; after what is pending."""
        position, rotation = self._target.position, self._target.rotation
        for action in self._pending.unbind(1):
            position = position + POSITION_SCALE * action[:, :3]
            rotation = torch.bmm(rotation_matrix(ROTATION_SCALE * action[:, 3:6].double()).to(rotation), rotation)
        return position, rotation

    @property
    def elapsed(self) -> Int[Tensor, " N"]:
        """Control steps of each episode so far."""
        return self._progress.elapsed

    def close(self) -> None:
        """Release threads and rendering contexts."""
        self.backend.close()
