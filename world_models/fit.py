"""Fit a world model to recorded clips: flow matching, motion weighting, roll-in on its own predictions.

Loss of one prediction (recipe of WORLD models trained for control; Lipman et al. 2023 for the objective):

    w |x^ - x|^2 / max(s, .25)^2,   x_s = (1 - s) x + s noise,   w = 1 + motion_weight where the pixel moved

The second and later predictions of a clip start from the model's own frames, so that it learns to correct what it did
to itself (drift) instead of meeting it first in imagination.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from world_models.clips import Clip, ClipSampler
from world_models.dynamics import Moment, WorldModelError
from world_models.flow_world import Denoised, FlowWorld, Memory
from world_models.optimization import Metrics, Optimization, OptimizerConfig


@dataclass(frozen=True, kw_only=True)
class FitConfig(OptimizerConfig):
    """``chunks``: predictions per clip, all but the first from imagined frames; clips of one prediction until the share
    ``roll_in_from`` of the steps is done, since the frames of a young model teach nothing. ``full_noise``: share of
    predictions trained at s = 1, where a one-step sampler works. ``moved``: a pixel moved if a channel changed by more
    [latent].
    """

    chunks: int = 2
    roll_in_from: float = 0.6
    full_noise: float = 0.8
    motion_weight: float = 9.0
    moved: float = 0.12
    state_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunks < 1:
            raise ValueError(f"fit.chunks must be at least 1, got {self.chunks}")


class Fitter(Optimization):
    """Flow matching over the dynamics."""

    def __init__(self, model: FlowWorld, config: FitConfig, clips: ClipSampler, *, seed: int) -> None:
        check_clips(model, clips)
        super().__init__(model, config, clips, seed=seed)
        self.model, self.config = model, config

    @property
    def chunks(self) -> int:
        begun = self.step >= self.config.roll_in_from * self.config.steps
        return self.config.chunks if begun else 1

    def loss(self, clip: Clip) -> tuple[Tensor, Metrics]:
        """Mean over the clip's predictions; each later one starts from the one before, detached."""
        model, config = self.model, self.config
        moment = first_moment(model, clip)
        total, metrics = torch.zeros((), device=self.device), dict.fromkeys(("frame", "state", "error"), 0.0)
        chunks, limit = clip.action.shape[1], model.codec.limit
        for i in range(chunks):
            action, length = clip.action[:, i], clip.length[:, i]
            valid = (length > 0).float()
            truth, state = model.encode(clip.frames[:, i + 1]), clip.state[:, i + 1]
            memory = model.prefill_to_fit(moment, self._generator)
            noisy, s, target = self.example(memory, action, length, truth)
            out = model.denoised(memory, action, length, noisy, s)
            weight = motion_weight(truth, model.encode(clip.frames[:, i]), moment, config)
            frame = (weight * (out.latent - target).square()).flatten(1).mean(1) / s.clamp(min=0.25).square()
            state_error = self._state_error(out, state)
            square = (out.latent - truth).square()
            true_error = ((weight - 1) * square).flatten(1).sum(1) / (weight - 1).flatten(1).sum(1).clamp(min=1.0)
            error = (out.log_error - (true_error.detach() + 1e-6).log()).abs()
            one = frame + config.state_weight * state_error + 0.01 * error
            total = total + (valid * one).sum() / valid.sum().clamp(min=1)
            for name, value in (("frame", frame), ("state", state_error), ("error", error)):
                metrics[name] += ((valid * value).sum() / valid.sum().clamp(min=1)).item() / chunks
            moment = moment.advance(out.latent.detach().clamp(-limit, limit), out.state.detach(), action, length)
        return total / chunks, metrics

    def example(
        self, memory: Memory, action: Tensor, length: Tensor, truth: Tensor
    ) -> tuple[Tensor, Float[Tensor, " B"], Tensor]:
        """What the network is asked at which time s, and the clean latent that it should answer."""
        s = self._draw_times(len(truth)).to(truth.device)
        noise = torch.randn(truth.shape, generator=self._generator).to(truth.device)
        return torch.lerp(truth, noise, s[:, None, None, None, None]), s, truth

    def _state_error(self, out: Denoised, state: Tensor) -> Float[Tensor, " B"]:
        scale = self.model.normalizer.state_std * self.model.step_std
        return F.smooth_l1_loss(out.state / scale, state / scale, reduction="none", beta=0.1).mean(1)

    def _draw_times(self, batch: int) -> Float[Tensor, " B"]:
        """s = 1 for a share, logit-normal for the rest (Esser et al. 2024, Sec. 3.1)."""
        drawn = torch.sigmoid(torch.randn(batch, generator=self._generator)).clamp(min=1e-3)
        full = torch.rand(batch, generator=self._generator) < self.config.full_noise
        return torch.where(full, 1.0, drawn)


def first_moment(model: FlowWorld, clip: Clip) -> Moment:
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


def check_clips(model: FlowWorld, clips: ClipSampler) -> None:
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
