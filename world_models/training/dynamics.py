"""Fit of a world model's dynamics to recorded clips: flow matching that starts from the model's own predictions.

Loss of one prediction (Lipman et al. 2023):

    w |estimate - x|^2 / max(s, .25)^2,   x_s = (1 - s) x + s noise,   w = 1 + motion_weight where the pixel moved

Most predictions start from an earlier prediction instead of a recorded observation (roll-in), so that the model learns
to correct its own errors, which would otherwise accumulate over an imagined rollout.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from sims.devices.crossing import crossing, read_numbers
from sims.numbers.ranges import NonNegativeFloat, PartialShare, Share
from world_models.data.clip import Clip, first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.models.flow_model import CleanEstimate, FlowWorldModel, HistoryPrefill
from world_models.training.optimization import ClipOptimization, OptimizerConfig
from world_models.world_model import History, WorldModelError

Latents = Float[Tensor, "B cameras channels height width"]


@dataclass(frozen=True, kw_only=True)
class PredictionFitConfig(OptimizerConfig):
    """``roll_in``: share of predictions that start from an earlier prediction, once a share ``roll_in_from`` of the
    steps is done; earlier the predicted frames are too poor to learn from. ``motion_threshold``: a pixel moved if a
    channel changed by more [latent units]. ``state_weight``: of the state's error in the loss.
    """

    roll_in: PartialShare = 0.85
    roll_in_from: Share = 0.2
    motion_weight: NonNegativeFloat = 9.0
    motion_threshold: NonNegativeFloat = 0.12
    state_weight: NonNegativeFloat = 0.1


@dataclass(frozen=True, kw_only=True)
class DynamicsFitConfig(PredictionFitConfig):
    """``full_noise``: share of predictions fitted at s = 1, the only time that a one-step sampler uses."""

    full_noise: Share = 0.8


class PredictionFit(ClipOptimization):
    """Fit of clean estimates; each entry of the batch passes through an episode.

    Most predictions of an entry start where its previous one ended, with the predicted frame and state, so that any
    number of consecutive predictions occurs at the cost of one prediction per update.
    """

    def __init__(self, model: FlowWorldModel, config: PredictionFitConfig, clips: ClipSampler, *, seed: int) -> None:
        check_clips(model, clips)
        super().__init__(model, config, clips, seed=seed)
        self.model, self.config = model, config
        self._rolls_in = torch.zeros(config.batch_size, dtype=torch.bool)
        self._reached = torch.zeros(config.batch_size, dtype=torch.int64)  # index of the observation last predicted
        self._history: History | None = None  # predicted, at ``_reached``

    def draw(self) -> Clip:
        """Clips that continue at the observation last predicted, for a share ``roll_in``; fresh ones for the rest."""
        config = self.config
        begun = self._history is not None and self.step >= config.roll_in_from * config.steps
        drawn = torch.from_numpy(self._rng.random(config.batch_size) < config.roll_in)
        self._rolls_in = drawn & torch.from_numpy(self.clips.has_next(self._reached.numpy())) & begun
        fresh = self.clips.draw_starts(self._rng, config.batch_size)
        return self.clips.at(np.where(self._rolls_in.numpy(), self._reached.numpy(), fresh), 1, self._rng)

    def loss(self, clip: Clip) -> tuple[Float[Tensor, ""], dict[str, float]]:
        model, config = self.model, self.config
        history = self._start_history(clip)
        action, length = clip.action[:, 0], clip.length[:, 0]
        truth, state = model.encode(clip.frames[:, 1]), clip.state[:, 1]
        prefill = model.prefill_to_fit(history, self._generator)
        noisy, s, target = self.example(prefill, action, length, truth)
        out = model.estimate(prefill, action, length, noisy, s)
        weight = motion_weight(truth, model.encode(clip.frames[:, 0]), history, config)
        frame = (weight * (out.latent - target).square()).flatten(1).mean(1) / s.clamp(min=0.25).square()
        state_error = self._state_error(out, state)
        error = self._error_of_error(out, truth, weight)
        loss = (frame + config.state_weight * state_error + 0.01 * error).mean()
        limit = model.codec.limit
        with crossing("batches"):
            self._reached = clip.index[:, 1].cpu()
        self._history = history.advance(out.latent.detach().clamp(-limit, limit), out.state.detach(), action, length)
        values = {"frame": frame, "state": state_error, "error": error}
        return loss, read_numbers({name: value.mean() for name, value in values.items()})

    def _start_history(self, clip: Clip) -> History:
        """The predicted history where ``draw`` continued an entry, the recorded one elsewhere."""
        history = first_history(self.model, clip)
        if self._history is None:
            return history
        entry = torch.arange(len(clip)) + len(clip) * self._rolls_in
        with crossing("batches"):
            entry = entry.to(self.device)
        return History.cat([history, self._history])[entry]

    @abstractmethod
    def example(
        self, prefill: HistoryPrefill, action: Tensor, length: Tensor, truth: Latents
    ) -> tuple[Latents, Float[Tensor, " B"], Latents]:
        """The network's noisy input, its time s, and the clean latent that it should estimate."""

    def _state_error(self, out: CleanEstimate, state: Float[Tensor, "B state_dim"]) -> Float[Tensor, " B"]:
        scale = self.model.normalizer.state_std * self.model.step_std
        return F.smooth_l1_loss(out.state / scale, state / scale, reduction="none", beta=0.1).mean(1)

    def _error_of_error(self, out: CleanEstimate, truth: Latents, weight: Tensor) -> Float[Tensor, " B"]:
        """Absolute error of the estimated log squared error where pixels moved."""
        square = (out.latent - truth).square()
        moved = weight - 1
        true_error = (moved * square).flatten(1).sum(1) / moved.flatten(1).sum(1).clamp(min=1.0)
        return (out.log_error - (true_error.detach() + 1e-6).log()).abs()

    def state_dict(self) -> dict[str, Any]:
        history = None if self._history is None else vars(self._history)
        return super().state_dict() | {"reached": self._reached, "history": history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._reached = state["reached"]
        self._history = None if state["history"] is None else History(**state["history"]).to(self.device)


class DynamicsFit(PredictionFit):
    """Flow matching to the recording."""

    def __init__(self, model: FlowWorldModel, config: DynamicsFitConfig, clips: ClipSampler, *, seed: int) -> None:
        super().__init__(model, config, clips, seed=seed)
        self._full_noise = config.full_noise

    def example(
        self, prefill: HistoryPrefill, action: Tensor, length: Tensor, truth: Latents
    ) -> tuple[Latents, Float[Tensor, " B"], Latents]:
        s = self._draw_times(len(truth))
        noise = torch.randn(truth.shape, generator=self._generator, device=self.device)
        return torch.lerp(truth, noise, s[:, None, None, None, None]), s, truth

    def _draw_times(self, batch: int) -> Float[Tensor, " B"]:
        """s = 1 for a share ``full_noise``, logit-normal for the rest (Esser et al. 2024, Sec. 3.1)."""
        drawn = torch.sigmoid(torch.randn(batch, generator=self._generator, device=self.device)).clamp(min=1e-3)
        full = torch.rand(batch, generator=self._generator, device=self.device) < self._full_noise
        return torch.where(full, 1.0, drawn)


def motion_weight(
    target: Latents, before: Latents, history: History, config: PredictionFitConfig
) -> Float[Tensor, "B cameras 1 height width"]:
    """1, plus ``config.motion_weight`` where the recording moved or the history's current frame is wrong."""
    change = torch.maximum((target - before).abs(), (target - history.current).abs()).amax(-3, keepdim=True)
    return 1 + config.motion_weight * (change > config.motion_threshold).to(target.dtype)


def check_clips(model: FlowWorldModel, clips: ClipSampler) -> None:
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
