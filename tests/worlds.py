"""Small environments with known dynamics, for tests of collectors, algorithms and runners."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from sims.devices.crossing import crossing
from sims.vector_env import CannotCapture, EnvSpec, Observation, StartState, Step, encode_instructions


class ChainEnv:
    """Cells 0 .. length-1; an action above 0 moves right, else left. Reward 1 and success at the last cell.

    Time runs out after ``max_steps``. The start cell is seed % (length - 1). state = [cell, elapsed].
    ``can_capture`` False: an environment whose states cannot be saved.
    """

    def __init__(self, *, num_envs: int, length: int = 10, max_steps: int = 12, can_capture: bool = True) -> None:
        self.length = length
        self.spec = EnvSpec(
            name="chain", num_envs=num_envs, action_dim=1, state_dim=2, cameras=("front",), image_size=(4, 4),
            control_hz=10.0, max_steps=max_steps, tasks=("walk", "run"), device=torch.device("cpu"), fingerprint={},
            can_capture=can_capture,
        )  # fmt: skip
        self.cell = torch.zeros(num_envs, dtype=torch.int64)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64)
        self.success = torch.zeros(num_envs, dtype=torch.bool)
        self.finished = torch.ones(num_envs, dtype=torch.bool)
        self.starts: list[StartState] = [StartState(task=0, seed=0)] * num_envs
        self.observed: list[int] = []

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        ids = self.spec.ids(env_ids)
        for env_id, state in zip(ids, start, strict=True):
            self.starts[env_id] = state
            values = (state.seed % (self.length - 1), 0, 0, 0) if state.snapshot is None else state.snapshot
            self.cell[env_id], self.elapsed[env_id] = int(values[0]), int(values[1])
            self.success[env_id], self.finished[env_id] = bool(values[2]), bool(values[3])

    def step(self, action: Tensor) -> Step:
        running = ~self.finished
        move = torch.where(action[:, 0] > 0, 1, -1)
        self.cell = torch.where(running, (self.cell + move).clamp(0, self.length - 1), self.cell)
        self.elapsed = self.elapsed + running
        won = running & (self.cell == self.length - 1)
        self.success = self.success | won
        truncated = ~self.success & (self.elapsed >= self.spec.max_steps)
        self.finished = self.finished | self.success | truncated
        return Step(
            reward=won.float(), terminated=self.success.clone(), truncated=truncated, success=self.success.clone(),
            intervened=torch.zeros_like(won),
        )  # fmt: skip

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        ids = self.spec.ids(env_ids)
        self.observed.append(len(ids))
        return Observation(
            images=torch.zeros(len(ids), 1, 4, 4, 3, dtype=torch.uint8),
            state=torch.stack([self.cell[ids], self.elapsed[ids]], -1).float(),
            instruction=encode_instructions(["go right"] * len(ids)),
        )

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        if not self.spec.can_capture:
            raise CannotCapture("chain: this environment was made with can_capture=False")
        ids = self.spec.ids(env_ids)
        return tuple(
            StartState(
                task=self.starts[env_id].task,
                seed=self.starts[env_id].seed,
                snapshot=np.array([int(values[env_id]) for values in self._state()]),
            )
            for env_id in ids
        )

    def _state(self) -> tuple[Tensor, ...]:
        return self.cell, self.elapsed, self.success, self.finished

    def close(self) -> None: ...


COLORS = {"red": (220, 40, 40), "green": (40, 200, 60), "blue": (50, 80, 230)}


class PointEnv:
    """A white point on a plane with three colored squares: "go to the red square". 32 x 32 images, sparse reward.

    Actions are velocities, 1.0 = 0.1 per step on a plane of side 2; success within 0.1 of the named square, while
    touching another one ends the episode in failure.
    """

    size = 32
    reach = 0.12

    def __init__(self, *, num_envs: int, max_steps: int = 40, device: torch.device | None = None) -> None:
        device = torch.device("cpu") if device is None else device
        self.spec = EnvSpec(
            name="point", num_envs=num_envs, action_dim=2, state_dim=2, cameras=("top",),
            image_size=(self.size, self.size), control_hz=10.0, max_steps=max_steps, tasks=tuple(COLORS),
            device=device, fingerprint={},
        )  # fmt: skip
        self.point = torch.zeros(num_envs, 2, device=device)
        self.squares = torch.zeros(num_envs, 3, 2, device=device)
        self.task = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.elapsed = torch.zeros(num_envs, dtype=torch.int64, device=device)
        self.success = torch.zeros(num_envs, dtype=torch.bool, device=device)
        self.finished = torch.ones(num_envs, dtype=torch.bool, device=device)
        self.envs = torch.arange(num_envs, device=device)
        self.colors = torch.tensor([*COLORS.values(), (250, 250, 250)], dtype=torch.uint8).to(device)
        self.instructions = encode_instructions([f"go to the {color} square" for color in COLORS]).to(device)
        self.starts: list[StartState] = [StartState(task=0, seed=0)] * num_envs

    @crossing("starts")
    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        ids = self.spec.ids(env_ids)
        for env_id, state in zip(ids, start, strict=True):
            self.starts[env_id] = state
            generator = np.random.default_rng((state.seed, state.task))
            while True:
                places = generator.uniform(-0.85, 0.85, (4, 2))
                gaps = np.linalg.norm(places[:, None] - places[None], axis=-1) + 9 * np.eye(4)
                if gaps.min() > 0.5:
                    break
            self.squares[env_id] = torch.from_numpy(places[:3]).to(self.squares)
            self.point[env_id] = torch.from_numpy(places[3]).to(self.point)
            self.task[env_id], self.elapsed[env_id] = state.task, 0
            self.success[env_id] = self.finished[env_id] = False
            if state.snapshot is not None:
                x, y, elapsed, success, finished = state.snapshot
                self.point[env_id] = torch.tensor([x, y]).to(self.point)
                self.elapsed[env_id], self.success[env_id], self.finished[env_id] = (
                    int(elapsed),
                    bool(success),
                    bool(finished),
                )

    def step(self, action: Tensor) -> Step:
        running = ~self.finished
        moved = (self.point + 0.1 * action.clamp(-1, 1)).clamp(-1, 1)
        self.point = torch.where(running[:, None], moved, self.point)
        self.elapsed = self.elapsed + running
        near = (self.squares - self.point[:, None]).norm(dim=-1) < self.reach
        named = near[self.envs, self.task]
        won, wrong = running & named, running & near.any(-1) & ~named
        self.success = self.success | won
        truncated = ~self.success & (self.elapsed >= self.spec.max_steps)
        terminated = self.success | wrong | (self.finished & ~truncated)
        self.finished = self.finished | self.success | wrong | truncated
        return Step(
            reward=won.float(), terminated=terminated, truncated=truncated & ~terminated,
            success=self.success.clone(), intervened=torch.zeros_like(won),
        )  # fmt: skip

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        device = self.spec.device
        with crossing("starts"):
            ids = self.envs if env_ids is None else torch.tensor(list(env_ids)).to(device)
        cell = (torch.arange(self.size, device=device) + 0.5) / self.size * 2 - 1
        image = torch.full((len(ids), self.size, self.size, 3), 30, dtype=torch.uint8, device=device)
        squares = [(self.squares[ids][:, i], 0.12) for i in range(len(COLORS))]
        for color, (place, half) in zip(self.colors, [*squares, (self.point[ids], 0.07)], strict=True):
            inside_x = (cell - place[:, :1]).abs() < half
            inside_y = (cell - place[:, 1:]).abs() < half
            image = torch.where((inside_y[:, :, None] & inside_x[:, None, :])[..., None], color, image)
        return Observation(images=image[:, None], state=self.point[ids], instruction=self.instructions[self.task[ids]])

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        ids = self.spec.ids(env_ids)
        return tuple(
            StartState(
                task=self.starts[env_id].task,
                seed=self.starts[env_id].seed,
                snapshot=np.array(
                    [*self.point[env_id].tolist(), *self._flags(env_id)],
                    np.float64,
                ),
            )
            for env_id in ids
        )

    def _flags(self, env_id: int) -> tuple[int, bool, bool]:
        return int(self.elapsed[env_id]), bool(self.success[env_id]), bool(self.finished[env_id])

    def expert(self, *, noise: float, seed: int) -> PointExpert:
        return PointExpert(self, noise=noise, generator=torch.Generator(self.spec.device).manual_seed(seed))

    def close(self) -> None: ...


class PointExpert:
    """Moves straight to the named square."""

    def __init__(self, env: PointEnv, *, noise: float, generator: torch.Generator) -> None:
        self.env, self.noise, self.generator = env, noise, generator

    def act(self) -> Tensor:
        env = self.env
        target = env.squares[torch.arange(len(env.task)), env.task]
        heading = (target - env.point) / 0.1
        heading = heading / heading.norm(dim=-1, keepdim=True).clamp(min=1)
        draw = torch.randn(heading.shape, generator=self.generator, device=heading.device)
        return (heading + self.noise * draw).clamp(-1, 1)
