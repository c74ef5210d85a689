"""A VectorEnv as a Gymnasium environment, for other libraries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from torch import Tensor
from torch.nn import functional

from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from sims.starts import StartSequence
from sims.vector_env import MIN_INSTRUCTION_BYTES, EnvSpec, Observation, StartState, VectorEnv, decode_instructions


class ToGymnasiumVector(gymnasium.vector.VectorEnv):
    """With Gymnasium's default autoreset: the ``step`` after an episode's end resets it and ignores the action.

    Observations: {"images": uint8 [N, cameras, height, width, 3] (with cameras), "state": float32 [N, S],
    "instruction": zero-padded UTF-8, uint8 [N, ``instruction_bytes``]}. Cameras are rendered at every step, as
    Gymnasium's interface asks.
    """

    def __init__(self, env: VectorEnv, *, instruction_bytes: int = MIN_INSTRUCTION_BYTES) -> None:
        self.env, self.num_envs, self.instruction_bytes = env, env.spec.num_envs, instruction_bytes
        self.single_observation_space = observation_space(env.spec, instruction_bytes)
        self.single_action_space = action_space(env.spec)
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.metadata = {"autoreset_mode": AutoresetMode.NEXT_STEP, "render_fps": env.spec.control_hz}
        self._starts = self._start_sequence(int(np.random.SeedSequence().generate_state(1)[0]))
        self._ended = np.zeros(self.num_envs, dtype=bool)

    def reset(
        self,
        *,
        seed: int | np.integer | Sequence[int | np.integer | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """``options``: {"start": one StartState per environment} starts there.

        Until a seed is given the starts are random ones, others in every instance; ``seed``: of all that follow, or a
        list with one for each environment's first start, which then decides all others too. UserError for a seed
        below 0.
        """
        self.env.reset(start=_chosen(options) or self._take(seed))
        self._ended[:] = False
        return self._observe(), {}

    def step(
        self, actions: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray, dict[str, Any]]:
        resetting = self._ended
        step = self.env.step(torch.as_tensor(actions, dtype=torch.float32, device=self.env.spec.device))
        ids = np.flatnonzero(resetting).tolist()
        if ids:
            self.env.reset(ids, start=self._starts.take(len(ids)))
        terminated, truncated, success, valid = (
            flag.cpu().numpy() & ~resetting for flag in (step.terminated, step.truncated, step.success, step.valid)
        )
        reward = np.where(resetting, 0.0, step.reward.cpu().numpy()).astype(np.float64)
        self._ended = terminated | truncated
        info = {"success": success, "_success": ~resetting, "valid": valid, "_valid": ~resetting}
        return self._observe(), reward, terminated, truncated, info

    def close_extras(self, **kwargs: Any) -> None:
        self.env.close()

    def _observe(self) -> dict[str, np.ndarray]:
        return to_numpy(self.env.observe(), self.env.spec, self.instruction_bytes)

    def _take(self, seed: int | np.integer | Sequence[int | np.integer | None] | None) -> list[StartState]:
        given = [seed] if isinstance(seed, int | np.integer) else () if seed is None else seed
        if any(one is not None and one < 0 for one in given):
            raise UserError(f"seeds must be at least 0, got {seed}")
        if isinstance(seed, int | np.integer):
            self._starts, seed = self._start_sequence(int(seed)), None
        elif given and None not in given:
            self._starts = self._start_sequence(spawn_seed(0, *(int(one) for one in given if one is not None)))
        starts = self._starts.take(self.num_envs)
        if seed is None:
            return starts
        pairs = enumerate(zip(seed, starts, strict=True))
        return [start if one is None else self._start_sequence(int(one)).take(i + 1)[i] for i, (one, start) in pairs]

    def _start_sequence(self, seed: int) -> StartSequence:
        return StartSequence("train", seed=seed, num_tasks=len(self.env.spec.tasks))


class ToGymnasium(gymnasium.Env):
    """A VectorEnv with num_envs = 1 as a gymnasium.Env."""

    def __init__(self, env: VectorEnv, *, instruction_bytes: int = MIN_INSTRUCTION_BYTES) -> None:
        if env.spec.num_envs != 1:
            raise ValueError(f"ToGymnasium takes an environment with num_envs = 1, got {env.spec.num_envs}")
        self.env, self.instruction_bytes = env, instruction_bytes
        self.observation_space = observation_space(env.spec, instruction_bytes)
        self.action_space = action_space(env.spec)
        self.metadata = {"render_modes": [], "render_fps": env.spec.control_hz}

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(1 << 31))
        self.env.reset(start=_chosen(options) or [StartState(task=drawn % len(self.env.spec.tasks), seed=drawn)])
        return self._observe(), {}

    def step(self, action: np.ndarray) -> tuple[dict[str, np.ndarray], float, bool, bool, dict[str, Any]]:
        step = self.env.step(torch.as_tensor(action, dtype=torch.float32, device=self.env.spec.device)[None])
        info = {"success": bool(step.success), "valid": bool(step.valid)}
        return self._observe(), float(step.reward), bool(step.terminated), bool(step.truncated), info

    def close(self) -> None:
        self.env.close()

    def _observe(self) -> dict[str, np.ndarray]:
        batch = to_numpy(self.env.observe(), self.env.spec, self.instruction_bytes)
        return {name: values[0] for name, values in batch.items()}


def observation_space(spec: EnvSpec, instruction_bytes: int) -> spaces.Space[Any]:
    shown: dict[str, spaces.Space[Any]] = {
        "state": spaces.Box(-np.inf, np.inf, (spec.state_dim,), np.float32),
        "instruction": spaces.Box(0, 255, (instruction_bytes,), np.uint8),
    }
    if spec.cameras:
        shown["images"] = spaces.Box(0, 255, (len(spec.cameras), *spec.image_size, 3), np.uint8)
    return spaces.Dict(shown)


def action_space(spec: EnvSpec) -> spaces.Box:
    return spaces.Box(-1.0, 1.0, (spec.action_dim,), np.float32)


def to_numpy(obs: Observation, spec: EnvSpec, instruction_bytes: int) -> dict[str, np.ndarray]:
    """Copies, which the caller may keep and change. UserError if an instruction has more than ``instruction_bytes``."""
    shown = {"state": _copy(obs.state), "instruction": _copy(resized(obs.instruction, instruction_bytes))}
    return {"images": _copy(obs.images), **shown} if spec.cameras else shown


def resized(instruction: Tensor, instruction_bytes: int) -> Tensor:
    """Zero padding added or cut at the end of each instruction, [N, instruction_bytes]."""
    if instruction[:, instruction_bytes:].any():
        needed = max(len(text.encode()) for text in decode_instructions(instruction))
        raise UserError(f"an instruction of {needed} bytes: set instruction_bytes, which is {instruction_bytes}")
    return functional.pad(instruction, (0, instruction_bytes - instruction.shape[1]))


def _copy(tensor: Tensor) -> np.ndarray:
    return tensor.cpu().numpy().copy()


def _chosen(options: dict[str, Any] | None) -> list[StartState] | None:
    return None if options is None else options.get("start")
