"""The start-up audit: the training path must give the rollout's own log-probs, or nothing may be trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from policies.policy import ActionSample, Policy
from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass


class LogProbMismatch(UserError):
    """A stored log-prob and its recomputation differ, so every importance ratio would be wrong."""


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """|recomputed - stored| of one denoising step, over samples, chunk and dimensions."""

    step: int
    max: float
    mean: float


@torch.no_grad()
def audit_log_prob(
    policy: Policy, context: TensorDataclass, sample: ActionSample, *, tolerance: float = 1e-3
) -> list[StepDifference]:
    """Recompute the log-probs of ``sample`` (shapes [B, S, H, A]) as training will, and compare step by step.

    ``tolerance`` bounds the largest difference of any element, in nats: 1e-3 for float32, about 0.1 for bfloat16.
    Raises LogProbMismatch that names the worst step; a NaN counts as a difference.
    """
    recomputed = policy.log_prob(context, sample.path)
    if recomputed.shape != sample.log_prob.shape or recomputed.dtype != torch.float32:
        raise LogProbMismatch(
            f"log_prob gave {list(recomputed.shape)} {recomputed.dtype}, the rollout stored "
            f"{list(sample.log_prob.shape)} {sample.log_prob.dtype}; both must be [B, S, H, A] float32"
        )
    difference = (recomputed - sample.log_prob).abs().nan_to_num(nan=torch.inf)
    steps = sample.path.steps
    report = [_step_difference(difference, steps, int(step)) for step in torch.unique(steps)]
    worst = max(report, key=lambda row: row.max)
    if worst.max > tolerance:
        raise LogProbMismatch(
            f"denoising step {worst.step}: recomputed log-prob differs from the rollout's by up to {worst.max:.3g} "
            f"nats (mean {worst.mean:.3g}, tolerance {tolerance:g}); worst first: "
            + ", ".join(f"step {row.step} {row.max:.3g}" for row in sorted(report, key=lambda row: -row.max)[:4])
            + ". Sampling and scoring must use the same time grid, std, weights and precision."
        )
    return report


def _step_difference(difference: Tensor, steps: Tensor, step: int) -> StepDifference:
    chosen = difference[steps == step]  # [rows of this step, H, A]
    return StepDifference(step=step, max=float(chosen.max()), mean=float(chosen.mean()))
