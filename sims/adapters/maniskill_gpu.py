"""ManiSkill with all environments in one scene on a GPU (PhysX CUDA), in the trainer's interpreter."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sims.adapters.finished_envs import FinishedEnvs
from sims.adapters.maniskill import (
    ManiSkill,
    ManiSkillConfig,
    action_bounds,
    episode_seeds,
    flat_state,
    make_env,
    render,
    single_spec,
)
from sims.subproc.single_env import reward_fingerprint, seed32
from sims.subproc.vector_env import SubprocVectorEnv, vector_spec
from sims.vector_env import Observation, StartState, Step, VectorEnv, encode_instructions


def make_maniskill(config: ManiSkillConfig) -> VectorEnv:
    """``backend`` decides: one process per environment, or all environments on one GPU."""
    return ManiSkillGPU(config) if config.backend == "physx_cuda" else SubprocVectorEnv(config, ManiSkill)


class ManiSkillGPU:
    """An environment that has finished is still simulated; before it is observed it returns to its last state.

    Only ``observe`` renders, and a step waits for nothing on the device.
    A snapshot is what ``FinishedEnvs.captured`` gives and ManiSkill's own state. GPU physics is not reproducible bit by
    bit: a restored environment has the same positions and velocities but may continue slightly differently.
    """

    def __init__(self, config: ManiSkillConfig) -> None:
        self.config = config
        self._env = make_env(config, num_envs=config.num_envs)
        low, high = action_bounds(self._env)
        self.device = torch.device(self._env.device)
        self._low, self._high = (torch.tensor(bound, dtype=torch.float32, device=self.device) for bound in (low, high))
        observation, _ = self._env.reset(seed=0)
        single = single_spec(config, self._env, observation)
        versions = {"backend": config.backend, **reward_fingerprint(config)}
        self.spec = vector_spec(single, config.num_envs, self.device, **versions)
        self._instruction = encode_instructions(single.task_instructions).to(self.device)
        self._finished = FinishedEnvs(config.num_envs, max_steps=single.max_steps, device=self.device)
        self._starts = [StartState(task=0, seed=0)] * config.num_envs
        # of running environments the present ones, of finished ones those at their end
        self._state, self._seen = self._env.get_state(), flat_state(observation)

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """One by one by default, because ManiSkill draws a batch's starts from its first environment's seed."""
        ids = self.spec.ids(env_ids)
        index = torch.tensor(ids, device=self.device)
        seeds = [seed32(state.seed) % 2**31 for state in start]
        together = 1 if self.config.reset_each_env else max(1, len(ids))
        for i in range(0, len(ids), together):
            part = slice(i, i + together)
            of_each = episode_seeds(self.spec.num_envs, ids[part], seeds[part])
            self._env.reset(seed=of_each, options={"env_idx": index[part]})
        self._finished.begin(index)
        for env_id, state in zip(ids, start, strict=True):
            self._starts[env_id] = state
        self._restore(ids, start)
        fresh = torch.zeros_like(self._finished.finished)
        fresh[index] = True
        self._keep(self._env.get_obs(), fresh | ~self._finished.finished)

    def _restore(self, ids: Sequence[int], start: Sequence[StartState]) -> None:
        """Write the snapshots among ``start`` in one call."""
        captured = [(env_id, state.snapshot) for env_id, state in zip(ids, start, strict=True)]
        written = [(env_id, snapshot) for env_id, snapshot in captured if snapshot is not None]
        if written:
            values = torch.from_numpy(np.stack([snapshot for _, snapshot in written])).to(self.device)
            index = torch.tensor([env_id for env_id, _ in written], device=self.device)
            self._env.set_state(values[:, self._finished.CAPTURED :], index)
            self._finished.restore(index, values[:, : self._finished.CAPTURED])

    def step(self, action: Tensor) -> Step:
        unit = (action.to(self.device).clamp(-1.0, 1.0) + 1.0) / 2.0
        observation, reward, terminated, truncated, info = self._env.step(self._low + unit * (self._high - self._low))
        self._keep(observation, ~self._finished.finished)
        success = info["success"] if "success" in info else torch.zeros_like(terminated)
        return self._finished.record(
            reward=reward if self.config.reward == "shaped" else None,
            terminated=terminated,
            truncated=truncated,
            success=success.bool(),
        )

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        state = self._seen
        images = torch.zeros(len(state), 0, *self.spec.image_size, 3, dtype=torch.uint8, device=self.device)
        if self.config.cameras:
            ended = self._finished.finished.nonzero().flatten()
            if len(ended):
                self._env.set_state(self._state[ended], ended)
            images = render(self._env, self.config.cameras)
        obs = Observation(images=images, state=state.clone(), instruction=self._instruction.expand(len(state), -1))
        return obs if env_ids is None else obs[list(env_ids)]

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        ids = self.spec.ids(env_ids)
        captured = torch.cat([self._finished.captured(), self._state.float()], dim=1).cpu().numpy()
        return tuple(
            StartState(
                task=self._starts[env_id].task,
                seed=self._starts[env_id].seed,
                snapshot=captured[env_id],
            )
            for env_id in ids
        )

    def close(self) -> None:
        self._env.close()

    def _keep(self, observation: Any, running: Tensor) -> None:
        """Take the simulator's present state and ``observation`` for the environments ``running``, bool [N]."""
        self._state = torch.where(running[:, None], self._env.get_state(), self._state)
        self._seen = torch.where(running[:, None], flat_state(observation), self._seen)
