"""ManiSkill with all environments in one scene on a GPU (PhysX CUDA), in the trainer's interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sims.adapters.finished_envs import FinishedEnvs
from sims.adapters.maniskill import (
    ManiSkill,
    ManiSkillConfig,
    action_bounds,
    flat_state,
    make_env,
    render,
    single_spec,
)
from sims.subproc.single_env import seed32
from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import EnvSpec, Observation, StartState, Step, VectorEnv, encode_instructions


def make_maniskill(config: ManiSkillConfig) -> VectorEnv:
    """``backend`` decides: one process per environment, or all environments on one GPU."""
    return ManiSkillGPU(config) if config.backend == "physx_cuda" else SubprocVectorEnv(config, ManiSkill)


class ManiSkillGPU:
    """Each environment is reset on its own; one that has finished is still simulated, but its results are ignored.

    A snapshot is [elapsed, ManiSkill's own state]. GPU physics is not reproducible bit by bit: a restored environment
    has the same positions and velocities but may continue slightly differently.
    """

    def __init__(self, config: ManiSkillConfig) -> None:
        self.config = config
        self._env = make_env(config, num_envs=config.num_envs)
        low, high = action_bounds(self._env)
        self.device = torch.device(self._env.device)
        self._low, self._high = (torch.tensor(bound, dtype=torch.float32, device=self.device) for bound in (low, high))
        self._observation, _ = self._env.reset(seed=0)
        single = single_spec(config, self._env, self._observation)
        self.spec = EnvSpec(
            name=single.name,
            num_envs=config.num_envs,
            action_dim=single.action_dim,
            state_dim=single.state_dim,
            cameras=single.cameras,
            image_size=single.image_size,
            control_hz=single.control_hz,
            max_steps=single.max_steps,
            tasks=single.tasks,
            device=self.device,
            fingerprint=dict(single.fingerprint) | {"backend": config.backend},
        )
        self._instruction = encode_instructions(single.tasks).to(self.device)
        self._finished = FinishedEnvs(config.num_envs, max_steps=single.max_steps, device=self.device)
        self._starts = [StartState(task=0, seed=0)] * config.num_envs

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """Resets environments one by one: ManiSkill seeds a batch by its first environment only."""
        ids = list(range(self.spec.num_envs)) if env_ids is None else list(env_ids)
        for env_id, state in zip(ids, start, strict=True):
            index = torch.tensor([env_id], device=self.device)
            self._observation, _ = self._env.reset(seed=seed32(state.seed) % 2**31, options={"env_idx": index})
            self._starts[env_id] = state
            self._finished.begin(index)
            if state.snapshot is not None:
                values = torch.from_numpy(state.snapshot).to(self.device)
                self._env.set_state(values[None, 1:], index)
                self._finished.elapsed[env_id] = int(values[0])
        if any(state.snapshot is not None for state in start):
            self._observation = self._env.get_obs()

    def step(self, action: Tensor) -> Step:
        unit = (action.to(self.device).clamp(-1.0, 1.0) + 1.0) / 2.0
        self._observation, reward, terminated, truncated, info = self._env.step(
            self._low + unit * (self._high - self._low)
        )
        success = info["success"] if "success" in info else torch.zeros_like(terminated)
        return self._finished.record(
            reward=reward, terminated=terminated, truncated=truncated, success=success.bool(), observe=self._present
        )

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        obs = self._finished.observation(self._present())
        return obs if env_ids is None else obs[list(env_ids)]

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        ids = range(self.spec.num_envs) if env_ids is None else env_ids
        state = self._env.get_state().double().cpu().numpy()
        elapsed = self._finished.elapsed.cpu().numpy()
        return tuple(
            StartState(
                task=self._starts[env_id].task,
                seed=self._starts[env_id].seed,
                snapshot=np.concatenate([[elapsed[env_id]], state[env_id]]).astype(np.float32),
            )
            for env_id in ids
        )

    def close(self) -> None:
        self._env.close()

    def _present(self) -> Observation:
        state = flat_state(self._observation)
        count = len(state)
        images = torch.zeros(count, 0, *self.spec.image_size, 3, dtype=torch.uint8, device=self.device)
        if self.config.cameras:
            images = render(self._env, self.config.cameras)
        return Observation(images=images, state=state, instruction=self._instruction.expand(count, -1))
