"""The change of the robot's state that actions lead to, predicted from numbers alone."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor, nn


class Kinematics(nn.Module):
    """Conditioning features to the state's change in units of ``step_std``: a linear map plus a small network.

    Untrained, the output is zero.
    """

    def __init__(self, features: int, state_dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(features, state_dim)
        self.residual = nn.Sequential(
            nn.Linear(features, 256), nn.SiLU(), nn.Linear(256, 256), nn.SiLU(), nn.Linear(256, state_dim)
        )
        for last in (self.linear, self.residual[-1]):
            nn.init.zeros_(last.weight)  # type: ignore[arg-type]
            nn.init.zeros_(last.bias)  # type: ignore[arg-type]

    def forward(self, features: Float[Tensor, "B features"]) -> Float[Tensor, "B state_dim"]:
        return self.linear(features) + self.residual(features)
