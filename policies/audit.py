"""Log-prob audit: the training path must reproduce the log-probs of the rollout before anything is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from policies.policy import LikelihoodModel
from sims.errors import UserError
from sims.numbers.finite import check_finite
from sims.tensor_dataclass import TensorDataclass


class LogProbMismatch(UserError):
    """A stored log-prob and its recomputation differ, so every importance ratio would be wrong."""


@dataclass(frozen=True, kw_only=True)
class StepDifference:
    """|recomputed - stored| of one stochastic step, over environments, chunk and action dimensions."""

    step: int
    max: float
    mean: float


@runtime_checkable
class Scored(Protocol):
    """A sample with the log-prob that it had when it was drawn: ActionSample, or a batch of experience."""

    @property
    def trace(self) -> Any: ...

    @property
    def log_prob(self) -> Tensor: ...


@torch.no_grad()
def audit_log_prob(
    policy: LikelihoodModel, context: TensorDataclass, sample: Scored, *, tolerance: float = 1e-3
) -> list[StepDifference]:
    """Recompute the log-probs of ``sample`` (shape [B, S, H, A]) as training will, and compare step by step.

    ``tolerance`` bounds the largest difference of any element, in nats: 1e-3 for float32, about 0.1 for bfloat16.
    Raises LogProbMismatch that names the worst step, and NotFinite where a log-prob is not finite.
    """
    recomputed = policy.log_prob(context, sample.trace)
    if recomputed.shape != sample.log_prob.shape or recomputed.dtype != torch.float32:
        raise LogProbMismatch(
            f"log_prob gave {list(recomputed.shape)} {recomputed.dtype}, the rollout stored "
            f"{list(sample.log_prob.shape)} {sample.log_prob.dtype}; both must be [B, S, H, A] float32"
        )
    axes = ("environment", "denoising step", "step", "dimension")
    for name, log_prob in (("log_prob of the rollout", sample.log_prob), ("log_prob in training", recomputed)):
        check_finite(name, log_prob, axes, suspects={"policy weight": policy})
    difference = (recomputed - sample.log_prob).abs()
    report = [
        StepDifference(step=step, max=float(values.max()), mean=float(values.mean()))
        for step, values in enumerate(difference.unbind(1))
    ]
    worst = max(report, key=lambda row: row.max)
    if worst.max > tolerance:
        raise LogProbMismatch(
            f"stochastic step {worst.step}: recomputed log-prob differs from the rollout's by up to {worst.max:.3g} "
            f"nats (mean {worst.mean:.3g}, tolerance {tolerance:g}); worst first: "
            + ", ".join(f"step {row.step} {row.max:.3g}" for row in sorted(report, key=lambda row: -row.max)[:4])
            + ". Sampling and scoring must use the same time grid, std, weights and precision, and an environment must "
            "not change observations that it has given (vla-rl sims verify NAME)."
        )
    return report
