"""Scenes with labels on which an encoder is pretrained: what a simulator may offer beside its episodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from jaxtyping import Bool, Float
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation


@dataclass(frozen=True, kw_only=True)
class LabeledScenes(TensorDataclass):
    """Observations of single scenes, and numbers of the order of one that say where the named objects are.

    ``known`` is False where a scene does not have that landmark.
    """

    obs: Observation
    landmarks: Float[Tensor, "*B landmarks"]
    known: Bool[Tensor, "*B landmarks"]


@runtime_checkable
class PretrainingScenes(Protocol):
    """An unlimited, reproducible source of labeled scenes. Belongs to the thread that made it."""

    @property
    def num_landmarks(self) -> int: ...

    def scenes(self, *, seed: int, first: int, count: int) -> LabeledScenes:
        """Scenes ``first`` to ``first + count - 1`` of the sequence ``seed``; no scene is the start of an episode."""
        ...

    def errors(self, predicted: Float[Tensor, "B landmarks"], scenes: LabeledScenes) -> dict[str, float]:
        """What the errors of predicted landmarks mean: numbers with their unit in the name."""
        ...

    def close(self) -> None:
        """Free rendering contexts."""
        ...
