"""The gradient of a minibatch as the sum over its parts: one after the other, or in several processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from torch import nn

from sims.tensor_dataclass import TensorDataclass
from vla_rl.rollouts.experience import Experience

P = TypeVar("P", bound=TensorDataclass)


class GradientSum(Protocol):
    """The sum is the same, bit for bit, wherever the parts are computed: part by part, in their order."""

    def begin(self, batch: Experience, *, train_policy: bool, version: int | None) -> None:
        """``ClippedUpdate.run`` was called with these arguments."""
        ...

    def __call__(
        self, parts: Sequence[P], backward: Callable[[P], Mapping[str, float]], parameters: Sequence[nn.Parameter]
    ) -> dict[str, float]:
        """Leave the sum of the gradients of ``parts`` in ``parameters``, which have none before; sums of metrics.

        ``backward`` adds the gradient of a part to what the parameters have; its metrics have the same names for all.
        """
        ...


class InTurn:
    """In this process."""

    def begin(self, batch: Experience, *, train_policy: bool, version: int | None) -> None:
        """Nobody else needs to know."""

    def __call__(
        self, parts: Sequence[P], backward: Callable[[P], Mapping[str, float]], parameters: Sequence[nn.Parameter]
    ) -> dict[str, float]:
        totals: dict[str, float] = defaultdict(float)
        for part in parts:
            for name, value in backward(part).items():
                totals[name] += value
        return totals
