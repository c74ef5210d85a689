"""Fit of an inverse dynamics model, and the gate that it must pass before it may reward a world model.

A world model that ignores its actions can produce good images; only the actions recovered from them show it. An inverse
model is used only if its error is clearly larger on clips without motion, with blurred frames, with frames of another
clip or in reverse than on true clips; otherwise its reward could be had without following actions.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sims.devices.crossing import crossing
from world_models.data.clip import Clip
from world_models.data.clip_sampler import ClipSampler
from world_models.models.inverse_dynamics import InverseDynamics, to_pixels
from world_models.training.optimization import Optimization

GATE_CLIPS = 256


class InverseDynamicsFit(Optimization[Clip]):
    """Regression of the mean executed action of recorded chunks; sets the model's action scale first."""

    def __init__(self, model: InverseDynamics, clips: ClipSampler, *, seed: int) -> None:
        config = model.config
        optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, weight_decay=0.01)
        super().__init__(model, optimizer, steps=config.steps, seed=seed)
        self.model, self.clips = model, clips
        with crossing("scales"):
            sample = clips.draw(self._rng, 512, 1).to(self.device)
        std = model.target(sample.action[:, 0], sample.length[:, 0]).std(0)
        model.scale.copy_(torch.where(std > 1e-4, std, 1.0))

    def learning_rate(self) -> float:
        """Constant, then linear decay over the second half."""
        return self.model.config.learning_rate * min(1.0, 2 * (1 - self.step / self.steps))

    def draw(self) -> Clip:
        return self.clips.draw(self._rng, self.model.config.batch_size, 1)

    def loss(self, clip: Clip) -> tuple[Float[Tensor, ""], dict[str, float]]:
        length = clip.length[:, 0]
        predicted = self.model(to_pixels(clip.frames[:, 0]), to_pixels(clip.frames[:, 1]), length)
        return F.smooth_l1_loss(predicted, self.model.target(clip.action[:, 0], length)), {}


@torch.no_grad()
@crossing("evaluation")
def gate(model: InverseDynamics, held_out: ClipSampler, *, seed: int) -> dict[str, Any]:
    """Errors on true and on manipulated held-out clips; ``passed``: whether all manipulations are detected."""
    device = model.scale.device
    clip = held_out.draw(np.random.default_rng(seed), GATE_CLIPS, 1).to(device)
    before, after = to_pixels(clip.frames[:, 0]), to_pixels(clip.frames[:, 1])
    action, length = clip.action[:, 0], clip.length[:, 0]
    other = torch.randperm(GATE_CLIPS, generator=torch.Generator().manual_seed(seed)).to(device)
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
    smallest = min(error for name, error in errors.items() if name != "true")
    return {"errors": errors, "passed": smallest > model.config.gate_ratio * errors["true"]}
