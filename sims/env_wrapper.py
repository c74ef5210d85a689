"""An environment around another one: what it does not change goes through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from sims.vector_env import Observation, StartState, Step, VectorEnv


class EnvWrapper:
    """``env`` as it is; a subclass changes what it overrides."""

    def __init__(self, env: VectorEnv) -> None:
        self.env, self.spec = env, env.spec

    @property
    def failures(self) -> Sequence[Any]:
        """Of the environment's workers, where it has some."""
        return getattr(self.env, "failures", ())

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        self.env.reset(env_ids, start=start)

    def step(self, action: Tensor) -> Step:
        return self.env.step(action)

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        return self.env.observe(env_ids)

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        return self.env.capture(env_ids)

    def close(self) -> None:
        self.env.close()
