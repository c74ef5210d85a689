"""Guidance of a new chunk towards the actions still planned, against closed forms and finite differences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from policies.denoising.denoise import Predict, integrate
from policies.denoising.guidance import guidance_strength, guidance_weights, guided
from policies.denoising.kernels import FlowODE, FlowODEConfig, Prediction


def test_guidance_weights_by_hand() -> None:
    """H = 8, d = 2, s = 3: end = 5, c = 3/4, 2/4, 1/4 for i = 2, 3, 4."""

    def decay(c: float) -> float:
        return c * (math.exp(c) - 1) / (math.e - 1)

    weights = guidance_weights(8, delay=2, execute_steps=3, leftover=8)
    assert weights.tolist() == pytest.approx([1, 1, decay(0.75), decay(0.5), decay(0.25), 0, 0, 0])
    assert weights[2].item() == pytest.approx(0.48756, abs=1e-5)
    short = guidance_weights(8, delay=2, execute_steps=3, leftover=3)
    assert short.tolist() == pytest.approx([1, 1, decay(0.75), 0, 0, 0, 0, 0])


def test_guidance_strength_by_hand() -> None:
    """tau = 1/2: r^2 = 1/2, (1 - tau) / (tau r^2) = 2. tau = 0.1: r^2 = 81/82, 9 * 82/81 = 9.11, clipped to 5."""
    assert guidance_strength(0.5, 5.0) == pytest.approx(2.0)
    assert guidance_strength(0.9, 50.0) == pytest.approx(9 * 82 / 81)
    assert guidance_strength(0.9, 5.0) == 5.0
    assert guidance_strength(1.0, 5.0) == 5.0


def predictor(velocity: Callable[[torch.Tensor, float], torch.Tensor]) -> Predict:
    return lambda x, t: Prediction(target=velocity(x, float(t)))


def ode(steps: int) -> FlowODE:
    return FlowODE(FlowODEConfig(steps=steps))


def network() -> torch.nn.Module:
    generator = torch.Generator().manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(13, 32), torch.nn.Tanh(), torch.nn.Linear(32, 12)).double()
    for parameter in net.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3
    return net


def test_the_correction_is_the_true_vector_jacobian_product() -> None:
    """Against central differences of <error, clean(x)> with the error held fixed, at every element of x."""
    net = network()

    def velocity(x: torch.Tensor, t: float) -> torch.Tensor:
        flat = torch.cat([x.reshape(1, 12), torch.full((1, 1), t, dtype=torch.float64)], 1)
        return net(flat).reshape(1, 1, 4, 3)

    generator = torch.Generator().manual_seed(1)
    x, previous = torch.randn(2, 1, 1, 4, 3, generator=generator, dtype=torch.float64)
    weights, t = torch.tensor([1.0, 0.7, 0.2, 0.0], dtype=torch.float64), 0.6
    at_t = torch.tensor([[t]], dtype=torch.float64)
    steered = guided(predictor(velocity), previous=previous, weights=weights)(x, at_t).target
    correction = (velocity(x, t) - steered) / guidance_strength(t, 5.0)
    with torch.no_grad():
        error = weights[:, None] * (previous - (x - t * velocity(x, t)))
        expected = torch.zeros_like(x)
        for i in range(12):
            step = torch.zeros(12, dtype=torch.float64)
            step[i] = 1e-6
            high, low = (x + sign * step.reshape(1, 1, 4, 3) for sign in (1, -1))
            change = (high - t * velocity(high, t)) - (low - t * velocity(low, t))
            expected.view(-1)[i] = (error * change).sum() / 2e-6
    torch.testing.assert_close(correction, expected, rtol=1e-6, atol=1e-8)
    identity = guided(predictor(velocity), previous=previous, weights=weights, jacobian="identity")(x, at_t).target
    torch.testing.assert_close(velocity(x, t) - identity, guidance_strength(t, 5.0) * error, rtol=1e-9, atol=1e-12)
    assert not torch.allclose(identity, steered)


def test_guidance_pulls_the_tied_actions_and_leaves_the_free_ones() -> None:
    """Data at a point a: velocity (x - a) / t, clean prediction a for any x, Jacobian zero: nothing can be steered.

    Data N(0, 1): velocity x (2t - 1) / ((1-t)^2 + t^2), independent per action, so only tied actions move.
    """
    noise = torch.randn(1, 4, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)

    def point(x: torch.Tensor, t: float) -> torch.Tensor:
        return (x - 2.0) / t

    def gaussian(x: torch.Tensor, t: float) -> torch.Tensor:
        return x * (2 * t - 1) / ((1 - t) ** 2 + t**2)

    previous, weights = torch.full((1, 1, 4, 1), 1.5).double(), torch.tensor([1.0, 0.5, 0.0, 0.0]).double()
    steered = integrate(guided(predictor(point), previous=previous, weights=weights), ode(5), noise)
    torch.testing.assert_close(steered, torch.full_like(noise, 2.0))
    free = integrate(predictor(gaussian), ode(20), noise)
    tied = integrate(guided(predictor(gaussian), previous=previous, weights=weights), ode(20), noise)
    torch.testing.assert_close(tied[:, 2:], free[:, 2:])
    assert abs(tied[0, 0, 0] - 1.5) < 0.25 * abs(free[0, 0, 0] - 1.5)
    assert abs(tied[0, 1, 0] - 1.5) < 0.6 * abs(free[0, 1, 0] - 1.5)
