"""Fit a world model to recorded clips: flow matching, motion weighting, roll-in on its own predictions.

Loss of one prediction (recipe of WORLD models trained for control; Lipman et al. 2023 for the objective):

    w |x^ - x|^2 / max(s, .25)^2,   x_s = (1 - s) x + s noise,   w = 1 + motion_weight where the pixel moved

Most predictions start where an earlier one led, so that the model learns to correct what it did to itself (drift)
instead of meeting it first in imagination.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from policies.schedule import cosine_schedule
from world_models.data.clips import Clip, ClipSampler
from world_models.models.flow_model import Denoised, FlowWorld, Memory
from world_models.training.optimization import Metrics, Optimization, OptimizerConfig
from world_models.world_model import Moment, WorldModelError


@dataclass(frozen=True, kw_only=True)
class FitConfig(OptimizerConfig):
    """``go_on``: share of predictions that start where an earlier one led, once the share ``roll_in_from`` of the steps
    is done, since the frames of a young model teach nothing. ``full_noise``: share of predictions trained at s = 1,
    where a one-step sampler works. ``moved``: a pixel moved if a channel changed by more [latent].
    """

    go_on: float = 0.85
    roll_in_from: float = 0.2
    full_noise: float = 0.8
    motion_weight: float = 9.0
    moved: float = 0.12
    state_weight: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.go_on < 1:
            raise ValueError(f"fit.go_on must be in [0, 1), got {self.go_on}")


class Fitter(Optimization):
    """Flow matching over the dynamics.

    A row of the batch is a walk through an episode: most predictions start where the same row's last one led, frames
    and state as the model itself saw them, so that any depth is practised at the price of one prediction per step.
    """

    def __init__(self, model: FlowWorld, config: FitConfig, clips: ClipSampler, *, seed: int) -> None:
        check_clips(model, clips)
        super().__init__(model, config, clips, seed=seed)
        self.model, self.config = model, config
        self._goes_on = torch.zeros(config.batch_size, dtype=torch.bool)
        self._number = torch.zeros(config.batch_size, dtype=torch.int64)  # of the look that a row has come to
        self._moment: Moment | None = None  # what it looks like there

    def draw(self) -> Clip:
        config = self.config
        begun = self._moment is not None and self.step >= config.roll_in_from * config.steps
        drawn = torch.from_numpy(self._rng.random(config.batch_size) < config.go_on)
        self._goes_on = drawn & torch.from_numpy(self.clips.has_next(self._number.numpy())) & begun
        fresh = self.clips.starts(self._rng, config.batch_size)
        return self.clips.at(np.where(self._goes_on.numpy(), self._number.numpy(), fresh), 1, self._rng)

    def loss(self, clip: Clip) -> tuple[Tensor, Metrics]:
        model, config = self.model, self.config
        moment = first_moment(model, clip)
        if self._moment is not None:
            row = torch.arange(len(clip.number))
            moment = Moment.cat([moment, self._moment])[row + len(row) * self._goes_on]
        action, length = clip.action[:, 0], clip.length[:, 0]
        truth, state = model.encode(clip.frames[:, 1]), clip.state[:, 1]
        memory = model.prefill_to_fit(moment, self._generator)
        noisy, s, target = self.example(memory, action, length, truth)
        out = model.denoised(memory, action, length, noisy, s)
        weight = motion_weight(truth, model.encode(clip.frames[:, 0]), moment, config)
        frame = (weight * (out.latent - target).square()).flatten(1).mean(1) / s.clamp(min=0.25).square()
        state_error = self._state_error(out, state)
        square = (out.latent - truth).square()
        true_error = ((weight - 1) * square).flatten(1).sum(1) / (weight - 1).flatten(1).sum(1).clamp(min=1.0)
        error = (out.log_error - (true_error.detach() + 1e-6).log()).abs()
        loss = (frame + config.state_weight * state_error + 0.01 * error).mean()
        limit = model.codec.limit
        self._number = clip.number[:, 1].cpu()
        self._moment = moment.advance(out.latent.detach().clamp(-limit, limit), out.state.detach(), action, length)
        values = {"frame": frame, "state": state_error, "error": error}
        return loss, {name: value.mean().item() for name, value in values.items()}

    def state_dict(self) -> dict[str, Any]:
        moment = None if self._moment is None else vars(self._moment)
        return super().state_dict() | {"number": self._number, "moment": moment}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._number = state["number"]
        self._moment = None if state["moment"] is None else Moment(**state["moment"]).to(self.device)

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


def fit_kinematics(model: FlowWorld, clips: ClipSampler, *, seed: int, steps: int = 2000, batch: int = 64) -> None:
    """Where the actions lead the robot, from numbers alone: seconds, and exacter than what pictures teach in minutes.

    Frozen afterwards. Without it the picture's network puts the hand centimeters off, and everything smears.
    """
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows = clips.transitions(rng).to(model.device)
    nothing = rows.state[:, :0]
    moment = Moment(
        first=nothing,
        first_state=rows.state,
        previous=nothing,
        current=nothing,
        state=rows.state,
        previous_state=rows.previous_state,
        past_action=rows.past_action,
        past_length=rows.past_length,
    )
    features = model.conditioning(moment, rows.action, rows.length, torch.ones(len(nothing), device=model.device))
    target = (rows.next_state - rows.state) / model.normalizer.state_std / model.step_std
    optimizer = torch.optim.AdamW(model.kinematics.parameters(), lr=2e-3)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * cosine_schedule(step, steps=steps, warmup=50)
        drawn = torch.randint(len(features), (batch,), generator=generator).to(model.device)
        optimizer.zero_grad()
        F.smooth_l1_loss(model.kinematics(features[drawn]), target[drawn], beta=0.1).backward()
        optimizer.step()
    model.kinematics.requires_grad_(False)


def first_moment(model: FlowWorld, clip: Clip) -> Moment:
    """The real moment that a clip starts from."""
    return Moment(
        first=model.encode(clip.first),
        first_state=clip.first_state,
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
