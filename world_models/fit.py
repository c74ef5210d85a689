"""Fit a world model to recorded clips: flow matching, motion weighting, roll-in on its own predictions.

Loss of one prediction (recipe of WORLD models trained for control; Lipman et al. 2023 for the objective):

    w |x^ - x|^2 / max(s, .25)^2,   x_s = (1 - s) x + s noise,   w = 1 + motion_weight where the pixel moved

The second and later predictions of a clip start from the model's own frames, so that it learns to correct what it did
to itself (drift) instead of meeting it first in imagination.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from world_models.clips import Clip, ClipSampler
from world_models.conv_flow import ConvFlow, Denoised
from world_models.dynamics import Moment, WorldModelError

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class FitConfig:
    """``chunks``: predictions per clip, all but the first from imagined frames. ``full_noise``: share of predictions
    trained at s = 1, where a one-step sampler works. ``moved``: a pixel moved if a channel changed by more [latent].
    """

    steps: int = 3000
    batch_size: int = 32
    chunks: int = 2
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup: int = 50
    full_noise: float = 0.8
    motion_weight: float = 9.0
    moved: float = 0.12
    state_weight: float = 0.1
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"fit.{name} must be at least 1, got {getattr(self, name)}")


class Fitter:
    """One optimizer over the dynamics; ``state_dict`` / ``load_state_dict`` make a resumed fit exact."""

    def __init__(self, model: ConvFlow, config: FitConfig, clips: ClipSampler, *, seed: int) -> None:
        check_clips(model, clips)
        self.model, self.config, self.clips, self.step = model, config, clips, 0
        self.optimizer = torch.optim.AdamW(
            model.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.95)
        )
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def update(self) -> Metrics:
        """One optimizer step on a fresh batch."""
        config = self.config
        clip = self.clips.draw(self._rng, config.batch_size, config.chunks)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * self._schedule()
        self.optimizer.zero_grad(set_to_none=True)
        loss, metrics = self.loss(clip)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.step += 1
        return metrics | {"loss": loss.item(), "grad_norm": norm.item()}

    def loss(self, clip: Clip) -> tuple[Tensor, Metrics]:
        """Mean over the clip's predictions; each later one starts from the one before, detached."""
        model, config = self.model, self.config
        moment = first_moment(model, clip)
        total, metrics = torch.zeros(()), dict.fromkeys(("frame", "state", "error"), 0.0)
        chunks = clip.action.shape[1]
        for i in range(chunks):
            action, length = clip.action[:, i], clip.length[:, i]
            valid = (length > 0).float()
            target, state = model.encode(clip.frames[:, i + 1]), clip.state[:, i + 1]
            s = self._draw_times(len(action))
            noise = torch.randn(target.shape, generator=self._generator)
            noisy = torch.lerp(target, noise, s[:, None, None, None, None])
            out = model.denoised(model.prefill(moment), action, length, noisy, s)
            weight = motion_weight(target, model.encode(clip.frames[:, i]), moment, config)
            square = (out.latent - target).square()
            frame = (weight * square).flatten(1).mean(1) / s.clamp(min=0.25).square()
            state_error = self._state_error(out, state)
            true_error = ((weight - 1) * square).flatten(1).sum(1) / (weight - 1).flatten(1).sum(1).clamp(min=1.0)
            error = (out.log_error - (true_error.detach() + 1e-6).log()).abs()
            one = frame + config.state_weight * state_error + 0.01 * error
            total = total + (valid * one).sum() / valid.sum().clamp(min=1)
            for name, value in (("frame", frame), ("state", state_error), ("error", error)):
                metrics[name] += ((valid * value).sum() / valid.sum().clamp(min=1)).item() / chunks
            moment = moment.advance(out.latent.detach().clamp(-1, 1), out.state.detach(), action, length)
        return total / chunks, metrics

    def _state_error(self, out: Denoised, state: Tensor) -> Float[Tensor, " B"]:
        scale = self.model.normalizer.state_std * self.model.step_std
        return F.smooth_l1_loss(out.state / scale, state / scale, reduction="none", beta=0.1).mean(1)

    def _draw_times(self, batch: int) -> Float[Tensor, " B"]:
        """s = 1 for a share, logit-normal for the rest (Esser et al. 2024, Sec. 3.1)."""
        drawn = torch.sigmoid(torch.randn(batch, generator=self._generator)).clamp(min=1e-3)
        full = torch.rand(batch, generator=self._generator) < self.config.full_noise
        return torch.where(full, 1.0, drawn)

    def _schedule(self) -> float:
        """Linear warm-up, then half a cosine down to a twentieth."""
        if self.step < self.config.warmup:
            return (self.step + 1) / self.config.warmup
        done = (self.step - self.config.warmup) / max(1, self.config.steps - self.config.warmup)
        return 0.05 + 0.95 * 0.5 * (1 + float(np.cos(np.pi * min(1.0, done))))

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self._rng.bit_generator.state,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._rng.bit_generator.state = state["rng"]
        self._generator.set_state(state["generator"])


def first_moment(model: ConvFlow, clip: Clip) -> Moment:
    """The real moment that a clip starts from."""
    return Moment(
        first=model.encode(clip.first),
        previous=model.encode(clip.previous),
        current=model.encode(clip.frames[:, 0]),
        state=clip.state[:, 0],
        previous_state=clip.previous_state,
        past_action=clip.past_action,
        past_length=clip.past_length,
    )


def motion_weight(target: Tensor, before: Tensor, moment: Moment, config: FitConfig) -> Tensor:
    """1, and ``motion_weight`` more where the truth moved or the model's own last frame is wrong."""
    change = torch.maximum((target - before).abs(), (target - moment.current).abs()).amax(-3, keepdim=True)
    return 1 + config.motion_weight * (change > config.moved).to(target.dtype)


def check_clips(model: ConvFlow, clips: ClipSampler) -> None:
    """WorldModelError unless these episodes are of the model's robot."""
    robot = model.robot
    for name, got, expected in (
        ("action dimensions", clips.action_dim, robot.action_dim),
        ("state dimensions", clips.state_dim, robot.state_dim),
        ("cameras", list(clips.cameras), list(robot.cameras)),
        ("image size", list(clips.image_size), list(robot.image_size)),
    ):
        if got != expected:
            raise WorldModelError(f"the episodes have {name} {got}, the world model was made for {expected}")
