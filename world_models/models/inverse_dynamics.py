"""Inverse dynamics: which actions led from one observation to the next, recovered from their images."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from policies.policy import RobotSpec

Frames = Float[Tensor, "B cameras 3 height width"]


@dataclass(frozen=True, kw_only=True)
class InverseDynamicsConfig:
    """``gate_ratio``: on manipulated clips the error must be this many times the error on true ones."""

    width: int = 32
    steps: int = 500
    batch_size: int = 64
    learning_rate: float = 1e-3
    gate_ratio: float = 1.5


class InverseDynamics(nn.Module):
    """Predicts the mean executed action of a chunk, in standard deviations, from the images before and after it."""

    scale: Tensor

    def __init__(self, config: InverseDynamicsConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config, self.robot = config, robot
        w = config.width
        self.image = nn.Sequential(
            nn.Conv2d(6, w, 4, stride=4),
            nn.SiLU(),
            nn.Conv2d(w, 2 * w, 3, stride=2, padding=1),
            nn.GroupNorm(4, 2 * w),
            nn.SiLU(),
            nn.Conv2d(2 * w, 2 * w, 3, padding=1),
            nn.SiLU(),
            nn.AdaptiveAvgPool2d(4),
            nn.Flatten(),
        )
        features = 16 * 2 * w * len(robot.cameras) + 1
        self.head = nn.Sequential(nn.Linear(features, 128), nn.SiLU(), nn.Linear(128, robot.action_dim))
        self.register_buffer("scale", torch.ones(robot.action_dim))

    def forward(self, before: Frames, after: Frames, length: Int[Tensor, " B"]) -> Float[Tensor, "B A"]:
        """Pixels are in [-1, 1]."""
        pairs = torch.cat([before, after - before], dim=2)
        seen = self.image(pairs.flatten(0, 1)).unflatten(0, (len(before), -1)).flatten(1)
        return self.head(torch.cat([seen, length[:, None] / 8], dim=1))

    def error(
        self, before: Frames, after: Frames, action: Float[Tensor, "B H A"], length: Int[Tensor, " B"]
    ) -> Float[Tensor, " B"]:
        """Mean absolute error of the recovered mean action, in standard deviations."""
        return (self(before, after, length) - self.target(action, length)).abs().mean(1)

    def target(self, action: Float[Tensor, "B H A"], length: Int[Tensor, " B"]) -> Float[Tensor, "B A"]:
        """The mean of the first ``length`` actions, in standard deviations."""
        executed = torch.arange(action.shape[1], device=action.device) < length[:, None]
        return (action * executed[..., None]).sum(1) / length.clamp(min=1)[:, None] / self.scale


def to_pixels(images: UInt8[Tensor, "B cameras height width 3"]) -> Frames:
    """Images as pixels in [-1, 1]."""
    return images.movedim(-1, -3).float() / 127.5 - 1
