"""What off-policy learning asks of a policy besides ``Policy``."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor


@runtime_checkable
class CriticGuided(Protocol):
    """A policy whose actions can follow the gradient of a Q function (off-policy learning).

    Its parameter group "residual" follows the critic's gradient; the group "encoder", if any, is trained by the critic.
    ``squashed``: whether draws are tanh-Gaussian with a learned spread, as entropy bonuses need.
    ``acts_in_noise``: whether its "actions" here are the noise of a frozen policy; ``critic_action_shape``: of one.
    """

    squashed: bool
    acts_in_noise: bool
    critic_action_shape: tuple[int, int]

    @property
    def action_scale(self) -> Float[Tensor, " width"]:
        """The unit of each dimension of what is valued: half of the demonstrations' range."""
        ...

    def critic_action(self, trace: Any, executed: Float[Tensor, "B H A"]) -> Float[Tensor, "B length width"]:
        """What the critic values of a chunk that was sampled: the action as executed, or the noise it was made from."""
        ...

    def features_are_unscaled(self) -> bool:
        """Whether ``fit_features`` has measured nothing yet; no property, which ``isinstance`` would read on a GPU."""
        ...

    def fit_features(self, record: Any) -> None:
        """Measure the scale of what ``store`` kept of some observations, once, before the first update."""
        ...

    def mean_action(self, context: Any) -> Float[Tensor, "B H A"]:
        """The deployed action, differentiable."""
        ...

    def rsample(
        self, context: Any, generator: torch.Generator, draws: int = 1
    ) -> tuple[Float[Tensor, "draws B H A"], Float[Tensor, "draws B H A"]]:
        """Exploring actions and the log densities of their draws per element, all differentiable."""
        ...

    def within_range(self, context: Any, share: Float[Tensor, "draws B H A"]) -> Float[Tensor, "draws B H A"]:
        """Actions at ``share``, from -1 to 1, of the largest correction: a squashed draw's density is of this."""
        ...

    def correction(self, context: Any, action: Float[Tensor, "B H A"]) -> Float[Tensor, "B H A"]:
        """How far ``action`` is from what is corrected; 1 is the largest correction."""
        ...

    def critic_features(self, context: Any) -> Float[Tensor, "B value_dim"]:
        """As ``value_features``, with the gradient of what the critic trains."""
        ...
