"""Sample a denoising chain and score a stored one: two functions, one transition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from policies.denoising.kernels import Kernel, Prediction, Transition
from policies.policy import executed_mask
from sims.tensor_dataclass import TensorDataclass

Predict = Callable[[Tensor, Tensor], Prediction]
"""The network with its context bound: x_t [B, S, H, A] and t [B or 1, S] -> the prediction, each [B, S, H, A]."""


@dataclass(frozen=True, kw_only=True)
class DenoisingTrace(TensorDataclass):
    """The chain x_{t_0} (noise) .. x_{t_K} (action) of a sample, in normalized action space.

    ``steps``: indices i of the transitions x_{t_i} -> x_{t_{i+1}} that were drawn at random and are trained (all of
    them, DPPO's last K', or one per sample).
    """

    states: Float[Tensor, "*B K_plus_1 H A"]
    steps: Int[Tensor, "*B S"]


def draw_steps(kernel: Kernel, batch: int, generator: torch.Generator) -> Int[Tensor, "B S"]:
    """Indices of the trained transitions: all of the kernel's, or one drawn per sample."""
    trained = kernel.trained_steps
    if kernel.one_step_per_sample:
        return torch.randint(trained.start, trained.stop, (batch, 1), generator=generator, device=generator.device)
    return torch.arange(trained.start, trained.stop, device=generator.device).expand(batch, -1)


@torch.no_grad()
def denoise(
    predict: Predict,
    kernel: Kernel,
    x_1: Float[Tensor, "B H A"],
    generator: torch.Generator,
    *,
    frozen_predict: Predict | None = None,
) -> tuple[DenoisingTrace, Float[Tensor, "B S scored_H scored_A"]]:
    """Take the kernel's steps from noise ``x_1``; the trace and the log-prob of its trained transitions.

    Of all elements, or of those that the kernel explores (executed.py).

    ``frozen_predict`` takes the steps before the first trained one (DPPO). Float32 throughout, no graph.
    """
    batch = x_1.shape[0]
    steps = draw_steps(kernel, batch, generator)
    grid = kernel.grid(x_1.device)
    states = [x_1]
    log_probs: list[Tensor] = []
    for i in range(kernel.steps):
        early = frozen_predict is not None and i < kernel.trained_steps.start
        explore = (steps == i).view(batch, 1, 1, 1) if kernel.one_step_per_sample else None
        x_t, t, dt = states[-1].unsqueeze(1), grid[i].view(1, 1), (grid[i] - grid[i + 1]).view(1, 1)
        prediction = frozen_predict(x_t, t) if early and frozen_predict is not None else predict(x_t, t)
        transition = kernel.transition(x_t, prediction, t[..., None, None], dt[..., None, None], explore)
        x_next = transition.sample(_draw_noise(x_t, kernel, generator))
        states.append(x_next.squeeze(1))
        if i in kernel.trained_steps:
            log_probs.append(transition.log_prob(x_next))
    trace = DenoisingTrace(states=torch.stack(states, dim=1), steps=steps)
    if not log_probs:
        return trace, x_1.new_zeros(batch, 0, *x_1.shape[1:])
    log_prob = torch.cat(log_probs, dim=1)
    if kernel.one_step_per_sample:
        log_prob = _take(log_prob, steps - kernel.trained_steps.start)
    return trace, log_prob


def integrate(predict: Predict, kernel: Kernel, x_1: Float[Tensor, "B H A"]) -> Float[Tensor, "B H A"]:
    """The sample that a deterministic kernel makes of the noise ``x_1``; differentiable."""
    grid = kernel.grid(x_1.device)
    x_t = x_1.unsqueeze(1)
    for i in range(kernel.steps):
        t, dt = grid[i].view(1, 1), (grid[i] - grid[i + 1]).view(1, 1)
        x_t = kernel.transition(x_t, predict(x_t, t), t[..., None, None], dt[..., None, None]).mean
    return x_t.squeeze(1)


def between(first: Predict, second: Predict, weight: float) -> Predict:
    """(1 - weight) first + weight second: classifier-free guidance (Ho and Salimans 2022) of deterministic steps."""

    def predict(x_t: Tensor, t: Tensor) -> Prediction:
        return Prediction(target=torch.lerp(first(x_t, t).target, second(x_t, t).target, weight))

    return predict


def trace_transition(predict: Predict, kernel: Kernel, trace: DenoisingTrace) -> tuple[Transition, Tensor]:
    """The trained transitions of ``trace`` ([B, S, H, A]) in one network call, and the states they led to."""
    x_t, x_next = _take(trace.states, trace.steps), _take(trace.states, trace.steps + 1)
    grid = kernel.grid(x_t.device)
    t, t_next = grid[trace.steps], grid[trace.steps + 1]
    prediction = predict(x_t, t)
    return kernel.transition(x_t, prediction, t[..., None, None], (t - t_next)[..., None, None]), x_next


def no_prediction(x_t: Tensor, t: Tensor) -> Prediction:
    """For kernels whose std does not depend on the network."""
    return Prediction(target=torch.zeros_like(x_t))


def counted_transitions(
    kernel: Kernel, trace: DenoisingTrace, num_executed: Int[Tensor, " B"]
) -> Bool[Tensor, "B S H"]:
    """``Policy.counted`` of a chain: all elements, except at the last transition the actions that never ran.

    The network mixes the actions of a chunk, so what is drawn for one of them in an earlier transition moves the
    others; only the draws of the last transition stay apart.
    """
    last = trace.steps == kernel.steps - 1
    executed = executed_mask(num_executed, trace.states.shape[2])
    return executed[:, None] | ~last[:, :, None]


def _draw_noise(x_t: Tensor, kernel: Kernel, generator: torch.Generator) -> Tensor:
    noise = torch.randn(x_t.shape, generator=generator, device=x_t.device, dtype=x_t.dtype)
    return noise if kernel.noise_clip is None else noise.clamp(-kernel.noise_clip, kernel.noise_clip)


def _take(values: Tensor, steps: Tensor) -> Tensor:
    """values [B, N, H, A] at steps [B, S] -> [B, S, H, A]."""
    return values.gather(1, steps[:, :, None, None].expand(-1, -1, *values.shape[2:]))
