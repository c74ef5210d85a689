"""An environment whose tensors are where the policy is, wherever it computes itself."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from sims.chunk import ChunkStep, step_chunk
from sims.devices.crossing import crossing
from sims.env_wrapper import EnvWrapper
from sims.vector_env import Observation, StartState, Step, VectorEnv


def on_device(env: VectorEnv, device: torch.device) -> VectorEnv:
    """``env`` with tensors on ``device``: itself where it is there already."""
    return env if env.spec.device == device else EnvOnDevice(env, device)


class EnvOnDevice(EnvWrapper):
    """Moves actions to ``env`` and everything else to ``device``, a whole action chunk at a time."""

    def __init__(self, env: VectorEnv, device: torch.device) -> None:
        super().__init__(env)
        self.spec = dataclasses.replace(env.spec, device=device)

    def step(self, action: Float[Tensor, "N A"]) -> Step:
        step = self.env.step(self._to_env(action))
        with crossing("outcomes"):
            return step.to(self.spec.device)

    def advance(self, actions: Float[Tensor, "N H A"], gamma: float) -> ChunkStep:
        """``step_chunk`` of the environment itself."""
        chunk = step_chunk(self.env, self._to_env(actions), gamma)
        with crossing("outcomes"):
            return chunk.to(self.spec.device)

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        obs = self.env.observe(env_ids)
        with crossing("observations"):
            return obs.to(self.spec.device)

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        with crossing("checkpoint"):
            return self.env.capture(env_ids)

    def _to_env(self, action: Tensor) -> Tensor:
        with crossing("actions"):
            return action.to(self.env.spec.device)
