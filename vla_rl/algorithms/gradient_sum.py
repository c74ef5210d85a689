"""The gradient of a minibatch as the sum over its parts: one after the other, or in several processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

from torch import Tensor, nn

from sims.tensor_dataclass import TensorDataclass
from vla_rl.rollouts.experience import Experience

P = TypeVar("P", bound=TensorDataclass)
B = TypeVar("B", bound=TensorDataclass, contravariant=True)
R = TypeVar("R")


@runtime_checkable
class Backward(Protocol[B]):
    """Adds the gradient of ``part`` to what the parameters have; metrics of ``part``."""

    def __call__(self, part: B) -> Mapping[str, float]: ...


class GradientSum(Protocol):
    """Where the gradients of parts are computed, and the weights are: all of them in each process, or a share.

    The sum is the same, bit for bit, wherever the parts are computed: part by part, in their order. ``divided``: each
    process has a share of every weight.
    """

    divided: bool

    def begin(self, batch: Experience, *, train_policy: bool, version: int | None) -> None:
        """``ClippedUpdate.run`` was called with these arguments."""
        ...

    def __call__(
        self, parts: Sequence[P], backward: Backward[P], parameters: Sequence[nn.Parameter]
    ) -> dict[str, float]:
        """Leave the sum of the gradients of ``parts`` in ``parameters``, which have none before; sums of metrics, which
        have the same names for all parts."""
        ...

    def compute(self, function: Callable[..., R], *arguments: Any) -> R:
        """``function(*arguments)``, which uses the weights."""
        ...

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        """The L2 norm of all ``gradients`` together."""
        ...


class InTurn:
    """In this process."""

    divided = False

    def begin(self, batch: Experience, *, train_policy: bool, version: int | None) -> None:
        """Nobody else needs to know."""

    def __call__(
        self, parts: Sequence[P], backward: Backward[P], parameters: Sequence[nn.Parameter]
    ) -> dict[str, float]:
        totals: dict[str, float] = defaultdict(float)
        for part in parts:
            for name, value in backward(part).items():
                totals[name] += value
        return totals

    def compute(self, function: Callable[..., R], *arguments: Any) -> R:
        return function(*arguments)

    def norm(self, gradients: Sequence[Tensor]) -> Tensor:
        return nn.utils.get_total_norm(gradients)
