"""The seam between policies and everything that runs or improves them.

Flow time everywhere: t = 1 is noise, t = 0 is action.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation


@dataclass(frozen=True, kw_only=True)
class DenoisingTrace(TensorDataclass):
    """The chain x_{t_0} (noise) .. x_{t_K} (action) that a sample took, in normalized action space.

    ``steps`` are the indices i of the transitions x_{t_i} -> x_{t_{i+1}} that were drawn at random and are trained
    (all K of them, DPPO's last K', or one per sample).
    """

    states: Float[Tensor, "*B K_plus_1 H A"]
    steps: Int[Tensor, "*B S"]


@dataclass(frozen=True, kw_only=True)
class ActionSample(TensorDataclass):
    """``action`` is in environment units, clipped to [-1, 1]; ``log_prob`` per trained step and element, float32."""

    action: Float[Tensor, "*B H A"]
    path: DenoisingTrace
    log_prob: Float[Tensor, "*B S H A"]


C = TypeVar("C", bound=TensorDataclass)


@runtime_checkable
class Policy(Protocol[C]):
    """A chunked policy whose training and rollout share one code path. Context C is any ``TensorDataclass`` record."""

    @property
    def action_horizon(self) -> int: ...

    @property
    def action_dim(self) -> int: ...

    @property
    def value_dim(self) -> int: ...

    def encode(self, obs: Observation) -> C:
        """Images, words and state, once per look."""
        ...

    def sample(self, context: C, generator: torch.Generator) -> ActionSample:
        """Exploring, with the path it took. Does not build a graph."""
        ...

    def log_prob(self, context: C, path: DenoisingTrace) -> Float[Tensor, "B S H A"]:
        """Of the trained steps of ``path``, float32, differentiable; the same code as ``sample``."""
        ...

    def entropy(self, context: C, path: DenoisingTrace) -> Float[Tensor, "B S H A"]:
        """Of the same transitions; constant in the parameters unless the noise is learned."""
        ...

    def trainable_parameters(self, *, encoder: bool) -> list[torch.nn.Parameter]:
        """What an optimizer moves, with or without the encoder."""
        ...

    def value_features(self, context: C) -> Float[Tensor, "B value_dim"]:
        """Detached, for the critic."""
        ...

    def bc_loss(
        self,
        context: C,
        action: Float[Tensor, "B H A"],
        mask: Float[Tensor, "B H"],
        generator: torch.Generator,
        future: Float[Tensor, "B F state_dim"] | None = None,
    ) -> Tensor:
        """Imitation loss of chunks ``action`` (environment units); ``mask`` is 0 on padding. Scalar.

        ``future``: states that the demonstration reached later (episodes/sampler.py), to be guessed from the look.
        """
        ...

    def act(
        self, context: C, generator: torch.Generator, prefix: Float[Tensor, "B P A"] | None = None
    ) -> Float[Tensor, "B H A"]:
        """Deployment: noise drawn once, then the deterministic flow. ``prefix``: actions already committed."""
        ...
