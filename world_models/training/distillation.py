"""Distillation into fewer denoising steps: one long step of the student replaces several steps of its teacher.

Progressive distillation (Salimans & Ho 2022, Algorithm 2) in flow time, all halvings at once. The teacher's own steps
lead from x_t to x_t'; a single Euler step leads there if the student's clean estimate is

    x~ = (t x_t' - t' x_t) / (t - t')

which is the average velocity in between, as in shortcut models (Frans et al. 2024). Those learn every step size in one
network that is given the size; a student here has a fixed number of steps, so nothing is added to its network.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from policies.denoising.kernels import time_grid
from sims.numbers.ranges import Depth, PositiveFloat, PositiveInt
from world_models.data.clip_sampler import ClipSampler
from world_models.models.flow_model import FlowWorldModel, HistoryPrefill
from world_models.training.dynamics import Latents, PredictionFit, PredictionFitConfig


@dataclass(frozen=True, kw_only=True)
class DistillConfig(PredictionFitConfig):
    """``to``: the student's denoising steps."""

    to: Depth = 1
    steps: PositiveInt = 600
    learning_rate: PositiveFloat = 5e-4

    def stride(self, teacher_steps: int) -> int:
        """Number of teacher steps per student step. ValueError unless it is whole."""
        if self.to < 1 or teacher_steps % self.to:
            raise ValueError(
                f"distill.to must divide the teacher's {teacher_steps} steps (dynamics.steps), got {self.to}"
            )
        return teacher_steps // self.to


class Distillation(PredictionFit):
    """Turns ``model`` into a student with ``config.to`` steps of its present self, the teacher.

    Histories are recorded or rolled in as in all ``PredictionFit``; state and error are fitted to the recording.
    """

    def __init__(self, model: FlowWorldModel, config: DistillConfig, clips: ClipSampler, *, seed: int) -> None:
        super().__init__(model, config, clips, seed=seed)
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False)
        self.to, self.stride = config.to, config.stride(model.config.steps)
        model.config = replace(model.config, steps=config.to)

    def example(
        self, prefill: HistoryPrefill, action: Tensor, length: Tensor, truth: Latents
    ) -> tuple[Latents, Float[Tensor, " B"], Latents]:
        """One of the student's steps, drawn per sample, from a state of the teacher's sampler."""
        teacher, batch = self.teacher, torch.arange(len(truth), device=truth.device)
        noise = teacher.noise(len(truth), self._generator)
        states = teacher.sampling_states(teacher.prefill(prefill.history), action, length, noise)
        grid = time_grid(teacher.config.steps, truth.device)
        begin = self.stride * torch.randint(self.to, (len(truth),), generator=self._generator, device=self.device)
        t, t_end = grid[begin], grid[begin + self.stride]
        x_t, x_end = states[batch, begin], states[batch, begin + self.stride]
        t_, t_end_ = t[:, None, None, None, None], t_end[:, None, None, None, None]
        return x_t, t, (t_ * x_end - t_end_ * x_t) / (t_ - t_end_)
