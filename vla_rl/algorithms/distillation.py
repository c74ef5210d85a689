"""A policy of fewer denoising steps that acts as a given one does, for a robot that has no time for all of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from episodes.sampler import Targets
from policies.denoising.chunk_policy import DenoisedChunks
from policies.device import Device
from policies.policy import Policy, executed_mask, masked_mean
from policies.registry import build_policy
from sims.errors import UserError
from sims.numbers.ranges import PositiveInt
from sims.tensor_dataclass import TensorDataclass
from vla_rl.algorithms.bc import BCConfig


@dataclass(frozen=True, kw_only=True)
class DistillationConfig:
    """Of ``vla-rl distill``. The student deploys with ``denoising_steps``; it learns from the observations of
    ``episodes`` of its teacher. ``fit``: of the student, whose encoder must be frozen, as it is the teacher's."""

    denoising_steps: PositiveInt = 1
    episodes: PositiveInt = 200
    fit: BCConfig = field(default_factory=lambda: BCConfig(steps=2000, learning_rate=3e-4, frozen=("encoder",)))

    def __post_init__(self) -> None:
        if self.fit.progress is not None:
            raise ValueError("distillation.fit.progress must be null: a student learns from its teacher everywhere")


def make_student(teacher: Policy, denoising_steps: int, device: Device) -> Policy:
    """A copy of ``teacher`` on ``device`` that deploys with ``denoising_steps``.

    UserError where it does not denoise, has no more steps than that, or cannot take so many.
    """
    kernel = getattr(teacher.config, "act", None)
    steps = getattr(kernel, "steps", None)
    if not isinstance(teacher, DenoisedChunks) or kernel is None or steps is None:
        raise UserError(f"policy {teacher.config.name} does not denoise; only a denoising policy can be distilled")
    if steps <= denoising_steps:
        raise UserError(
            f"the policy deploys with {steps} denoising steps already; distillation.denoising_steps must be below"
        )
    config = replace(teacher.config, act=replace(kernel, steps=denoising_steps))
    try:
        student = build_policy(config, teacher.spec.robot)
    except ValueError as error:
        raise UserError(f"distillation.denoising_steps cannot be {denoising_steps}: {error}") from None
    student.load_state_dict(teacher.state_dict())
    return device.place(student)


@dataclass(frozen=True, kw_only=True)
class TeacherLoss:
    """Squared error of the student's denoised chunk from the teacher's, of the same noise, context and prefix.

    Consistency distillation from the teacher's whole trajectory, as RL-100's last stage (Lei et al. 2025,
    arXiv:2510.14830): the student maps noise to the action in one go, and the teacher's action has no gradient. With
    ``max_prefix`` the first actions of every chunk are given, as ``bc_loss`` gives them: of 0 to ``max_prefix``
    recorded ones, all equally often.
    """

    teacher: Policy

    def __call__(
        self, student: Policy, context: TensorDataclass, targets: Targets, generator: torch.Generator
    ) -> Float[Tensor, ""]:
        assert isinstance(student, DenoisedChunks) and isinstance(self.teacher, DenoisedChunks)  # by ``make_student``
        noise = torch.randn(len(context), *student.spec.noise_shape, generator=generator, device=student.device)
        if not (longest := student.spec.max_prefix):
            with torch.no_grad():
                wanted = self.teacher.denoised(context, noise)
            return (student.denoised(context, noise) - wanted).square().mean()
        length = torch.randint(longest + 1, (len(context),), generator=generator, device=student.device)
        known = executed_mask(length, targets.action.shape[1])
        with torch.no_grad():
            wanted = self.teacher.denoised(context, noise, targets.action, known)
        return masked_mean((student.denoised(context, noise, targets.action, known) - wanted).square(), ~known)
