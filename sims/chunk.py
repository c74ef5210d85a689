"""Execute an action chunk in any VectorEnv."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from sims.vector_env import Step, VectorEnv


@dataclass(frozen=True, kw_only=True)
class ChunkStep(Step):
    """Result of a chunk. ``reward`` is discounted within it; the chunk's own discount is gamma ** num_executed.

    Where it is not ``valid`` the environment failed during this chunk: it must not be learned from, and comes back
    truncated, with reward 0 and no action executed.
    """

    num_executed: Int[Tensor, "*N"]


@runtime_checkable
class ChunkedEnv(Protocol):
    """An environment that executes a whole chunk in one call (an imagined one, worker processes)."""

    def advance(self, actions: Float[Tensor, "N H A"], gamma: float) -> ChunkStep: ...


def step_chunk(env: VectorEnv, actions: Float[Tensor, "N H A"], gamma: float) -> ChunkStep:
    """Execute ``actions`` in every environment until the chunk or the environment's episode ends.

    actions: [N, H, A] in [-1, 1]. The actions after an episode's end are not executed; the reward is
    sum_{i < num_executed} gamma^i r_i. An environment that had finished before the chunk comes back done; its other
    values are undefined.
    """
    if isinstance(env, ChunkedEnv):
        return env.advance(actions, gamma)
    total = None
    for i in range(actions.shape[1]):
        step = env.step(actions[:, i])
        if total is None:
            total = ChunkStep(
                reward=torch.zeros_like(step.reward),
                num_executed=torch.zeros_like(step.reward, dtype=torch.int64),
                terminated=torch.zeros_like(step.terminated),
                truncated=torch.zeros_like(step.terminated),
                success=torch.zeros_like(step.terminated),
                intervened=torch.zeros_like(step.terminated),
                true_success=None if step.true_success is None else torch.zeros_like(step.terminated),
            )
        running = ~total.done
        valid = total.valid & (step.valid | ~running)
        total = ChunkStep(
            reward=torch.where(valid, total.reward + torch.where(running, gamma**i * step.reward, 0.0), 0.0),
            num_executed=torch.where(valid, total.num_executed + running, 0),
            terminated=total.terminated | (running & step.terminated),
            truncated=total.truncated | (running & step.truncated),
            success=total.success | (running & step.success),
            intervened=total.intervened | (running & step.intervened),
            valid=valid,
            true_success=_either(total.true_success, running, step.true_success),
        )
        if total.done.device.type == "cpu" and bool(total.done.all()):  # on a GPU the host would wait for every step
            break
    assert total is not None
    return total


def _either(
    before: Bool[Tensor, " N"] | None, running: Bool[Tensor, " N"], now: Bool[Tensor, " N"] | None
) -> Bool[Tensor, " N"] | None:
    return None if before is None or now is None else before | (running & now)
