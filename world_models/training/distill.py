"""Few-step students: one long step learns to land where several short steps of its teacher do.

Progressive distillation (Salimans & Ho 2022, Algorithm 2) in flow time, all halvings at once. The teacher walks
from x_t to x_t' by its own steps; a single Euler step gets there if the student's clean estimate is

    x~ = (t x_t' - t' x_t) / (t - t')

which is the average velocity of the way, as in shortcut models (Frans et al. 2024). Those learn every step size in
one network that is told the size; a student here serves one number of steps, so nothing is added to its network.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from policies.denoising.kernels import time_grid
from world_models.data.clips import ClipSampler
from world_models.models.flow_model import FlowWorld, Memory
from world_models.training.fit import FitConfig, Fitter


@dataclass(frozen=True, kw_only=True)
class DistillConfig(FitConfig):
    """``to``: the student's denoising steps."""

    to: int = 1
    steps: int = 600
    learning_rate: float = 5e-4

    def stride(self, teacher_steps: int) -> int:
        """The teacher's steps in one of the student's. ValueError unless they go in evenly."""
        if self.to < 1 or teacher_steps % self.to:
            raise ValueError(f"distill.to must divide the teacher's {teacher_steps} steps (world.steps), got {self.to}")
        return teacher_steps // self.to


class Distiller(Fitter):
    """Turns ``model`` into its own student: from now on it takes ``config.to`` steps, what it was is the teacher.

    Contexts are recorded and rolled in as in a fit, and state and error are still learned from what truly happened.
    """

    def __init__(self, model: FlowWorld, config: DistillConfig, clips: ClipSampler, *, seed: int) -> None:
        super().__init__(model, config, clips, seed=seed)
        self.teacher = copy.deepcopy(model).eval().requires_grad_(False)
        self.to, self.stride = config.to, config.stride(model.config.steps)
        model.config = replace(model.config, steps=config.to)

    def example(
        self, memory: Memory, action: Tensor, length: Tensor, truth: Tensor
    ) -> tuple[Tensor, Float[Tensor, " B"], Tensor]:
        """One of the student's own steps, drawn per sample, from a state of the teacher's walk."""
        teacher, batch = self.teacher, torch.arange(len(truth), device=truth.device)
        noise = teacher.noise(len(truth), self._generator).to(truth)
        path = teacher.walk(teacher.prefill(memory.moment), action, length, noise)
        grid = time_grid(teacher.config.steps, truth.device)
        begin = self.stride * torch.randint(self.to, (len(truth),), generator=self._generator)
        begin = begin.to(truth.device)
        t, t_end = grid[begin], grid[begin + self.stride]
        x_t, x_end = path[batch, begin], path[batch, begin + self.stride]
        t_, t_end_ = t[:, None, None, None, None], t_end[:, None, None, None, None]
        return x_t, t, (t_ * x_end - t_end_ * x_t) / (t_ - t_end_)
