"""Properties for every seed and size."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.denoising.denoise import denoise, trace_transition
from policies.denoising.kernels import (
    FlowCPS,
    FlowCPSConfig,
    FlowNoise,
    FlowNoiseConfig,
    FlowSDE,
    FlowSDEConfig,
    Prediction,
    time_grid,
)
from policies.denoising.objectives import Diffusion, DiffusionConfig, FlowMatching, FlowMatchingConfig
from policies.normalizer import Normalizer

seeds = st.integers(0, 2**31 - 1)
noise_levels = st.floats(0.05, 0.95)


def kernels(steps, level):
    return [
        FlowSDE(FlowSDEConfig(steps=steps, noise_level=level)),
        FlowSDE(FlowSDEConfig(steps=steps, noise_level=level, random_steps="one")),
        FlowCPS(FlowCPSConfig(steps=steps, noise_level=level)),
        FlowNoise(FlowNoiseConfig(steps=steps, min_std=0.05 * level, max_std=level)),
    ]


@settings(deadline=None, max_examples=25)
@given(seed=seeds, batch=st.integers(1, 5), steps=st.integers(2, 12), level=noise_levels, which=st.integers(0, 3))
def test_a_sampled_trace_has_the_same_log_prob_when_scored(seed, batch, steps, level, which):
    kernel = kernels(steps, level)[which]
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 3, generator=generator)

    def predict(x_t, t):
        hidden = torch.tanh(x_t @ weight + t[..., None, None])
        return Prediction(target=hidden, noise=hidden)

    trace, log_prob = denoise(predict, kernel, torch.randn(batch, 2, 3, generator=generator), generator)
    assert torch.isfinite(log_prob).all()
    transition, x_next = trace_transition(predict, kernel, trace)
    assert torch.allclose(transition.log_prob(x_next), log_prob, atol=1e-3)


@settings(deadline=None, max_examples=25)
@given(seed=seeds, steps=st.integers(2, 12), level=noise_levels)
def test_a_vanishing_noise_level_gives_the_ode(seed, steps, level):
    x, v = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(seed))
    kernel = FlowSDE(FlowSDEConfig(steps=steps, noise_level=1e-4 * level))
    grid = time_grid(steps)
    for i in range(steps):
        step = kernel.transition(x, Prediction(target=v), grid[i], grid[i] - grid[i + 1])
        assert torch.allclose(step.mean, x - v / steps, atol=1e-5)
        assert float(step.std) < 1e-3


@given(steps=st.integers(1, 200))
def test_the_grid_goes_from_noise_to_action_in_equal_steps(steps):
    grid = time_grid(steps)
    assert grid[0] == 1
    assert grid[-1] == 0
    assert torch.allclose(grid[:-1] - grid[1:], torch.full((steps,), 1 / steps), atol=1e-6)


@given(seed=seeds, t=st.floats(0.01, 1.0))
def test_corruption_is_inverted_by_its_target(seed, t):
    action, noise = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3)
    time = torch.tensor(t)
    x_t, velocity = FlowMatching(FlowMatchingConfig()).corrupt(action, noise, time)
    assert torch.allclose(x_t - time * velocity, action, atol=1e-5)
    assert torch.allclose(x_t + (1 - time) * velocity, noise, atol=1e-5)
    diffusion = Diffusion(DiffusionConfig(levels=50))
    x_t, eps = diffusion.corrupt(action, noise, time)
    alpha_bar = diffusion.alpha_bar(time)
    assert torch.allclose(alpha_bar.sqrt() * action + (1 - alpha_bar).sqrt() * eps, x_t, atol=1e-6)


@settings(deadline=None, max_examples=50)
@given(seed=seeds, rows=st.integers(1, 40), scale=st.floats(1e-6, 1e3), shift=st.floats(-1e3, 1e3))
def test_normalised_actions_come_back(seed, rows, scale, shift):
    generator = torch.Generator().manual_seed(seed)
    action = torch.randn(rows, 3, generator=generator) * scale + shift
    action[:, 1] = shift
    normalizer = Normalizer(state_dim=2, action_dim=3)
    normalizer.fit(torch.randn(rows, 2, generator=generator), action)
    back = normalizer.unnormalize_action(normalizer.normalize_action(action))
    assert torch.allclose(back, action, rtol=1e-4, atol=1e-3)
    assert torch.isfinite(normalizer.normalize_action(action)).all()
    assert (normalizer.normalize_action(action)[:, 1].abs() < 1e-3).all()
