"""The state value: an MLP on the policy's detached features."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from sims.numbers.ranges import PositiveFloat, Width

_ENCODED = 16  # numbers; fewer are a state that the policy has normalized, not features of an encoder


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """``hidden``: layer widths. ``value_clip``: of PPO2's value clipping; null turns it off."""

    hidden: tuple[Width, ...] = (256, 256)
    learning_rate: PositiveFloat = 1e-3
    value_clip: PositiveFloat | None = 0.2
    huber_delta: PositiveFloat = 10.0
    initial_value: float = 0.0


class ValueCritic(nn.Module):
    """V(features), float32. The last layer starts at zero weight, so every value starts at ``initial_value``.

    An encoder's features may be of any scale and go through a LayerNorm. Fewer than 16 numbers go in as they are: a
    LayerNorm makes a constant of a state of one number and a sign of one of two.
    """

    def __init__(self, config: CriticConfig, feature_dim: int) -> None:
        super().__init__()
        self.config = config
        layers: list[nn.Module] = [nn.LayerNorm(feature_dim)] if feature_dim >= _ENCODED else []
        width = feature_dim
        for hidden in config.hidden:
            layers += [nn.Linear(width, hidden), nn.SiLU()]
            width = hidden
        head = nn.Linear(width, 1)
        nn.init.zeros_(head.weight)
        nn.init.constant_(head.bias, config.initial_value)
        self.network = nn.Sequential(*layers, head)

    def forward(self, features: Float[Tensor, "B F"]) -> Float[Tensor, " B"]:
        value: Tensor = self.network(features.float())
        return value.squeeze(-1)

    @torch.no_grad()
    def predict(self, features: Float[Tensor, "B F"]) -> Float[Tensor, " B"]:
        return self(features)
