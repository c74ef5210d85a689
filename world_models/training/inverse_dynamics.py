"""Which actions led from one moment to the next? Recovered from two frames, it tells whether a generated frame obeys.

A world model that ignores its actions makes fine pictures; only the actions read back from them show it. The inverse
model is trusted after its ``gate`` alone: on clips where nothing moved, where frames are blurred, of another clip or in
reverse, it must be clearly worse than on true ones, or its reward could be had without following actions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from policies.denoising.policy import RobotSpec
from world_models.data.clips import ClipSampler


@dataclass(frozen=True, kw_only=True)
class InverseConfig:
    """``gate_ratio``: on spoilt clips the error must be so many times the error on true ones."""

    width: int = 32
    steps: int = 500
    batch_size: int = 64
    learning_rate: float = 1e-3
    gate_ratio: float = 1.5


class InverseDynamics(nn.Module):
    """The mean executed action of a chunk, each dimension in its standard deviations, from the frames around it."""

    scale: Tensor

    def __init__(self, config: InverseConfig, robot: RobotSpec) -> None:
        super().__init__()
        self.config, self.robot = config, robot
        w = config.width
        self.look = nn.Sequential(
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

    def forward(self, before: Tensor, after: Tensor, length: Tensor) -> Float[Tensor, "B A"]:
        """before, after: latents [B, cameras, 3, h, w] in [-1, 1]; length [B]."""
        pairs = torch.cat([before, after - before], dim=2)
        seen = self.look(pairs.flatten(0, 1)).unflatten(0, (len(before), -1)).flatten(1)
        return self.head(torch.cat([seen, length[:, None] / 8], dim=1))

    def error(self, before: Tensor, after: Tensor, action: Tensor, length: Tensor) -> Float[Tensor, " B"]:
        """Mean absolute error of the recovered mean action, in standard deviations."""
        return (self(before, after, length) - self.target(action, length)).abs().mean(1)

    def target(self, action: Float[Tensor, "B H A"], length: Tensor) -> Float[Tensor, "B A"]:
        taken = torch.arange(action.shape[1], device=action.device) < length[:, None]
        return (action * taken[..., None]).sum(1) / length.clamp(min=1)[:, None] / self.scale


def latents(frames: Tensor) -> Tensor:
    """uint8 [B, cameras, h, w, 3] to [B, cameras, 3, h, w] in [-1, 1]."""
    return frames.movedim(-1, -3).float() / 127.5 - 1


def fit_inverse(model: InverseDynamics, clips: ClipSampler, *, seed: int) -> float:
    """Supervised on recorded chunks; the mean loss of the last tenth."""
    config, rng = model.config, np.random.default_rng(seed)
    sample = clips.draw(rng, 512, 1)
    std = model.target(sample.action[:, 0], sample.length[:, 0]).std(0)
    model.scale.copy_(torch.where(std > 1e-4, std, 1.0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.01)
    losses = []
    for step in range(config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * min(1.0, 2 * (1 - step / config.steps))
        clip = clips.draw(rng, config.batch_size, 1)
        length = clip.length[:, 0]
        found = model(latents(clip.frames[:, 0]), latents(clip.frames[:, 1]), length)
        loss = F.smooth_l1_loss(found, model.target(clip.action[:, 0], length))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    model.eval()
    return float(np.mean(losses[-max(1, len(losses) // 10) :]))


@torch.no_grad()
def gate(model: InverseDynamics, held_out: ClipSampler, *, seed: int, count: int = 256) -> dict[str, Any]:
    """Errors on true and on spoilt held-out clips, and whether every spoilt kind is told apart."""
    clip = held_out.draw(np.random.default_rng(seed), count, 1)
    before, after = latents(clip.frames[:, 0]), latents(clip.frames[:, 1])
    action, length = clip.action[:, 0], clip.length[:, 0]
    other = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    blurred = F.avg_pool2d(after.flatten(0, 1), 9, stride=1, padding=4, count_include_pad=False).view_as(after)
    cases = {
        "true": (before, after, action),
        "static": (before, before, action),
        "blurred": (before, blurred, action),
        "shuffled": (before, after[other], action),
        "reversed": (after, before, action),
        "wrong_action": (before, after, action[other]),
    }
    errors = {name: model.error(a, b, chunk, length).mean().item() for name, (a, b, chunk) in cases.items()}
    spoilt = min(error for name, error in errors.items() if name != "true")
    return {"errors": errors, "passed": spoilt > model.config.gate_ratio * errors["true"]}
