"""ManiSkill with all rows in one scene on a GPU (PhysX CUDA), in the trainer's own interpreter; tensors stay there."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sims.adapters.finished_envs import FinishedEnvs
from sims.adapters.maniskill import ManiSkillConfig, action_bounds, flat_state, make_env, render, single_spec
from sims.subproc.single_env import seed32
from sims.vector_env import EnvSpec, Observation, StartState, Step, encode_instructions


class ManiSkillGPU:
    """TensorDataclass reset on their own; a row that ended goes on in the scene unseen until then.

    A snapshot is [elapsed, ManiSkill's own state]. GPU physics is not reproducible bit by bit, so a restored row is
    where it was but may go on slightly differently.
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
        self._text = encode_instructions(single.tasks).to(self.device)
        self._rows = FinishedEnvs(config.num_envs, max_steps=single.max_steps, device=self.device)
        self._starts = [StartState(task=0, seed=0)] * config.num_envs

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """Resets environments one by one: ManiSkill seeds a batch by its first environment only."""
        rows = list(range(self.spec.num_envs)) if env_ids is None else list(env_ids)
        for row, state in zip(rows, start, strict=True):
            ids = torch.tensor([row], device=self.device)
            self._observation, _ = self._env.reset(seed=seed32(state.seed) % 2**31, options={"env_idx": ids})
            self._starts[row] = state
            self._rows.begin(ids)
            if state.snapshot is not None:
                values = torch.from_numpy(state.snapshot).to(self.device)
                self._env.set_state(values[None, 1:], ids)
                self._rows.elapsed[row] = int(values[0])
        if any(state.snapshot is not None for state in start):
            self._observation = self._env.get_obs()

    def step(self, action: Tensor) -> Step:
        unit = (action.to(self.device).clamp(-1.0, 1.0) + 1.0) / 2.0
        self._observation, reward, terminated, truncated, info = self._env.step(
            self._low + unit * (self._high - self._low)
        )
        success = info["success"] if "success" in info else torch.zeros_like(terminated)
        return self._rows.record(
            reward=reward, terminated=terminated, truncated=truncated, success=success.bool(), look=self._look
        )

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        seen = self._rows.shown(self._look())
        return seen if env_ids is None else seen[list(env_ids)]

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        rows = range(self.spec.num_envs) if env_ids is None else env_ids
        state = self._env.get_state().double().cpu().numpy()
        elapsed = self._rows.elapsed.cpu().numpy()
        return tuple(
            StartState(
                task=self._starts[row].task,
                seed=self._starts[row].seed,
                snapshot=np.concatenate([[elapsed[row]], state[row]]).astype(np.float32),
            )
            for row in rows
        )

    def close(self) -> None:
        self._env.close()

    def _look(self) -> Observation:
        state = flat_state(self._observation)
        count = len(state)
        images = torch.zeros(count, 0, *self.spec.image_size, 3, dtype=torch.uint8, device=self.device)
        if self.config.cameras:
            images = render(self._env, self.config.cameras)
        return Observation(images=images, state=state, instruction=self._text.expand(count, -1))
