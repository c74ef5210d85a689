"""A world small enough to know everything about, for tests of what acts in worlds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sims.vector_env import EnvSpec, Observation, StartState, Step, encode_text


class ChainWorld:
    """Cells 0 .. length-1; an action above 0 moves right, else left. Reward 1 and success at the last cell.

    Time runs out after ``max_steps``. The start cell is seed % (length - 1). state = [cell, elapsed].
    """

    def __init__(self, *, num_envs: int, length: int = 10, max_steps: int = 12) -> None:
        self.length = length
        self.spec = EnvSpec(
            name="chain", num_envs=num_envs, action_dim=1, state_dim=2, cameras=("front",), image_size=(4, 4),
            control_hz=10.0, max_steps=max_steps, tasks=("walk", "run"), device=torch.device("cpu"), fingerprint={},
        )  # fmt: skip
        self.cell = torch.zeros(num_envs, dtype=torch.int64)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64)
        self.success = torch.zeros(num_envs, dtype=torch.bool)
        self.standing = torch.ones(num_envs, dtype=torch.bool)
        self.starts: list[StartState] = [StartState(task=0, seed=0)] * num_envs
        self.looks: list[int] = []

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        rows = range(self.spec.num_envs) if env_ids is None else env_ids
        for row, state in zip(rows, start, strict=True):
            self.starts[row] = state
            values = (state.seed % (self.length - 1), 0, 0, 0) if state.snapshot is None else state.snapshot
            self.cell[row], self.elapsed[row] = int(values[0]), int(values[1])
            self.success[row], self.standing[row] = bool(values[2]), bool(values[3])

    def step(self, action: Tensor) -> Step:
        moving = ~self.standing
        move = torch.where(action[:, 0] > 0, 1, -1)
        self.cell = torch.where(moving, (self.cell + move).clamp(0, self.length - 1), self.cell)
        self.elapsed = self.elapsed + moving
        won = moving & (self.cell == self.length - 1)
        self.success = self.success | won
        truncated = ~self.success & (self.elapsed >= self.spec.max_steps)
        self.standing = self.standing | self.success | truncated
        return Step(
            reward=won.float(), terminated=self.success.clone(), truncated=truncated, success=self.success.clone(),
            intervened=torch.zeros_like(won),
        )  # fmt: skip

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        rows = list(range(self.spec.num_envs)) if env_ids is None else list(env_ids)
        self.looks.append(len(rows))
        return Observation(
            images=torch.zeros(len(rows), 1, 4, 4, 3, dtype=torch.uint8),
            state=torch.stack([self.cell[rows], self.elapsed[rows]], -1).float(),
            text=encode_text(["go right"] * len(rows)),
        )

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        rows = range(self.spec.num_envs) if env_ids is None else env_ids
        return tuple(
            StartState(
                task=self.starts[row].task,
                seed=self.starts[row].seed,
                snapshot=np.array([int(values[row]) for values in self._state()]),
            )
            for row in rows
        )

    def _state(self) -> tuple[Tensor, ...]:
        return self.cell, self.elapsed, self.success, self.standing

    def close(self) -> None: ...
