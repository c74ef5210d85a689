"""Exploration of the executed actions alone, for chunks that are longer or wider than what the robot executes.

The network denoises the whole chunk, padding included, and every element feeds back into the others. If all of them
were noisy, a log-prob of the executed ones alone would not be the density of what was drawn. Here the others follow the
deterministic flow, so the ratio and the action agree.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.denoising.kernels import Kernel, Prediction, Transition


@dataclass(frozen=True, kw_only=True)
class ExecutedTransition(Transition):
    """``executed`` is the random transition of the elements [..., first:end, :dims]; ``mean`` is of the whole chunk."""

    executed: Transition
    actions: slice
    dims: int

    def sample(self, noise: Tensor) -> Tensor:
        x_next = self.mean.clone()
        x_next[..., self.actions, : self.dims] = self.executed.sample(self._select(noise))
        return x_next

    def log_prob(self, x_next: Tensor) -> Tensor:
        """Of the executed elements."""
        return self.executed.log_prob(self._select(x_next))

    def entropy(self) -> Tensor:
        return self.executed.entropy()

    def _select(self, chunk: Tensor) -> Tensor:
        return chunk[..., self.actions, : self.dims]


class ExecutedOnly(Kernel):
    """``kernel`` for the actions ``first`` .. ``first + horizon`` and ``dims`` dimensions, ``rest`` for all others.

    ``rest`` is deterministic, on the same grid.
    """

    def __init__(self, kernel: Kernel, rest: Kernel, *, first: int = 0, horizon: int, dims: int) -> None:
        super().__init__(steps=kernel.steps, trained_steps=kernel.trained_steps)
        self.kernel, self.rest = kernel, rest
        self.actions, self.dims = slice(first, first + horizon), dims
        self.one_step_per_sample, self.learned_noise = kernel.one_step_per_sample, kernel.learned_noise
        self.frozen_early_steps, self.noise_clip = kernel.frozen_early_steps, kernel.noise_clip

    def transition(
        self, x_t: Tensor, prediction: Prediction, t: Tensor, dt: Tensor, explore: Tensor | None = None
    ) -> ExecutedTransition:
        def select(chunk: Tensor) -> Tensor:
            return chunk[..., self.actions, : self.dims]

        noise = None if prediction.noise is None else select(prediction.noise)
        executed = self.kernel.transition(
            select(x_t), Prediction(target=select(prediction.target), noise=noise), t, dt, explore
        )
        with torch.no_grad():  # the other elements are given in an update
            mean = self.rest.transition(x_t, prediction, t, dt).mean
        return ExecutedTransition(mean=mean, std=None, executed=executed, actions=self.actions, dims=self.dims)
