"""Golden numbers of every kernel's transition."""

import itertools
import math

import pytest
import torch
from diffusers.schedulers.scheduling_ddim import DDIMScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler

from policies.denoising.denoise import DenoisingTrace, denoise, trace_transition
from policies.denoising.kernels import (
    DDIM,
    DDPM,
    DDIMConfig,
    DDPMConfig,
    FlowCPS,
    FlowCPSConfig,
    FlowNoise,
    FlowNoiseConfig,
    FlowODE,
    FlowODEConfig,
    FlowSDE,
    FlowSDEConfig,
    Prediction,
    build_kernel,
    time_grid,
)
from policies.denoising.objectives import Diffusion, DiffusionConfig, FlowMatching, FlowMatchingConfig

MEAN, STD = 1.5, 0.3


def gaussian_velocity(x, t):
    """E[noise - action | x_t] when actions are Normal(MEAN, STD^2)."""
    spread = (1 - t) ** 2 * STD**2 + t**2
    return (t - (1 - t) * STD**2) / spread * (x - (1 - t) * MEAN) - MEAN


def gaussian_predict(x_t, t):
    return Prediction(target=gaussian_velocity(x_t, t[..., None, None]))


def run(kernel, *, samples=20000, seed=0):
    generator = torch.Generator().manual_seed(seed)
    path, _ = denoise(gaussian_predict, kernel, torch.randn(samples, 1, 1, generator=generator), generator)
    return path


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(3, [0.500, 0.408, 0.204]), (4, [0.500, 0.433, 0.250, 0.144]), (5, [0.500, 0.447, 0.274, 0.183, 0.112])],
)
def test_flow_sde_std_per_step(steps, expected):
    kernel = FlowSDE(FlowSDEConfig(steps=steps, noise_level=0.5))
    grid = kernel.grid()
    zero = torch.zeros(1)
    got = [kernel.transition(zero, Prediction(target=zero), t, t - n).std for t, n in itertools.pairwise(grid)]
    assert [float(std) for std in got] == pytest.approx(expected, abs=5e-4)


def test_flow_sde_mean_by_hand():
    # t = .5, dt = .25, a = .5: sigma^2 = .25; x1^ = 1 + .5 * 2 = 2; mean = 1 - .25 * 2 - .25 * .25 / 1 * 2 = .375
    kernel = FlowSDE(FlowSDEConfig(steps=4, noise_level=0.5))
    step = kernel.transition(
        torch.ones(1), Prediction(target=torch.full((1,), 2.0)), torch.tensor(0.5), torch.tensor(0.25)
    )
    assert float(step.mean) == pytest.approx(0.375)
    assert float(step.std) == pytest.approx(0.25)


def test_flow_sde_keeps_the_marginals_of_the_flow():
    path = run(FlowSDE(FlowSDEConfig(steps=200, noise_level=0.7)))
    grid = time_grid(200)
    for i in (50, 100, 150, 200):
        t = float(grid[i])
        expected = math.sqrt((1 - t) ** 2 * STD**2 + t**2)
        assert float(path.states[:, i].mean()) == pytest.approx((1 - t) * MEAN, abs=0.02)
        assert float(path.states[:, i].std()) == pytest.approx(expected, rel=0.025)


def test_few_steps_are_biased_by_the_known_amount():
    assert float(run(FlowODE(FlowODEConfig(steps=4))).states[:, -1].std()) == pytest.approx(0.177, abs=0.004)
    assert float(run(FlowSDE(FlowSDEConfig(steps=4, noise_level=0.7))).states[:, -1].std()) == pytest.approx(
        0.269, abs=0.005
    )


def test_flow_sde_noiseless_rows_take_the_ode_step():
    x, velocity = torch.randn(5, 1, 3, 2), torch.randn(5, 1, 3, 2)
    t, dt = torch.tensor(0.75), torch.tensor(0.25)
    explore = torch.tensor([True, False, True, False, False]).view(5, 1, 1, 1)
    mixed = FlowSDE(FlowSDEConfig()).transition(x, Prediction(target=velocity), t, dt, explore)
    ode = FlowODE(FlowODEConfig()).transition(x, Prediction(target=velocity), t, dt)
    assert torch.equal(mixed.mean[1], ode.mean[1])
    assert float(mixed.std[1]) == 0
    assert not torch.allclose(mixed.mean[0], ode.mean[0])


def test_flow_cps_preserves_the_coefficients():
    # With the exact noise estimate, the next state's noise has weight t' = .5 in total: cos^2 + sin^2 = 1.
    kernel = FlowCPS(FlowCPSConfig(steps=4, noise_level=0.5))
    action, noise, t, dt = torch.tensor(0.4), torch.tensor(-1.3), torch.tensor(0.75), torch.tensor(0.25)
    x_t = (1 - t) * action + t * noise
    step = kernel.transition(x_t, Prediction(target=noise - action), t, dt)
    assert float(step.mean) == pytest.approx(0.5 * 0.4 + 0.5 * math.cos(math.pi / 4) * -1.3)
    assert float(step.std) == pytest.approx(0.5 * math.sin(math.pi / 4))
    assert list(kernel.trained_steps) == [0, 1, 2]


def test_flow_noise_std_between_its_bounds():
    kernel = FlowNoise(FlowNoiseConfig(min_std=0.08, max_std=0.16))
    head = torch.tensor([-100.0, 0.0, 100.0])
    step = kernel.transition(
        torch.zeros(3), Prediction(target=torch.ones(3), noise=head), torch.tensor(1.0), torch.tensor(0.25)
    )
    assert step.std.tolist() == pytest.approx([0.08, math.sqrt(0.08 * 0.16), 0.16])
    assert step.mean.tolist() == pytest.approx([-0.25] * 3)


def test_deterministic_step_has_no_density():
    step = FlowODE(FlowODEConfig()).transition(
        torch.zeros(1), Prediction(target=torch.ones(1)), torch.ones(1), torch.ones(1)
    )
    with pytest.raises(ValueError, match="no density"):
        step.log_prob(torch.zeros(1))


def test_joint_density_of_a_linear_flow_is_the_closed_form_gaussian():
    """With v = c x + d every transition is linear, so the whole chain is one Gaussian; FlowSDE in float64."""
    c, d, steps = 0.7, -0.2, 4
    kernel = FlowSDE(FlowSDEConfig(steps=steps, noise_level=0.5))
    grid = kernel.grid().double()
    slope, offset, std = [], [], []
    for t, t_next in itertools.pairwise(grid):
        dt = t - t_next
        at_zero, at_one = (
            kernel.transition(x, Prediction(target=c * x + d), t, dt)
            for x in torch.tensor([0.0, 1.0], dtype=torch.float64)
        )
        slope.append(at_one.mean - at_zero.mean)
        offset.append(at_zero.mean)
        std.append(at_zero.std)
    # x = L z + m with z ~ N(0, I): row i + 1 = slope_i * row i, plus std_i in column i + 1.
    mean, lower = torch.zeros(steps + 1, dtype=torch.float64), torch.zeros(steps + 1, steps + 1, dtype=torch.float64)
    lower[0, 0] = 1
    for i in range(steps):
        mean[i + 1] = slope[i] * mean[i] + offset[i]
        lower[i + 1] = slope[i] * lower[i]
        lower[i + 1, i + 1] = std[i]
    joint = torch.distributions.MultivariateNormal(mean, covariance_matrix=lower @ lower.T)
    chain = joint.sample((7,))
    trace = DenoisingTrace(states=chain.view(7, steps + 1, 1, 1), steps=torch.arange(steps).expand(7, -1))
    transition, x_next = trace_transition(lambda x, t: Prediction(target=c * x + d), kernel, trace)
    initial = torch.distributions.Normal(0.0, 1.0).log_prob(trace.states[:, 0])
    total = transition.log_prob(x_next).sum((1, 2, 3)) + initial.sum((1, 2))
    assert torch.allclose(total, joint.log_prob(chain), atol=1e-6, rtol=0)


@pytest.mark.parametrize("steps", [5, 20, 100])
def test_ddpm_matches_diffusers(steps):
    objective = Diffusion(DiffusionConfig(levels=100))
    kernel = DDPM(DDPMConfig(steps=steps, train_last=1, min_std=0.0), objective)
    reference = DDPMScheduler(num_train_timesteps=100, beta_schedule="squaredcos_cap_v2", timestep_spacing="trailing")
    reference.set_timesteps(steps)
    x, eps = torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    grid = kernel.grid()
    for i, level in enumerate(reference.timesteps):
        got = kernel.transition(x, Prediction(target=eps), grid[i], grid[i] - grid[i + 1])
        generator = torch.Generator().manual_seed(i)
        want = reference.step(eps, int(level), x, generator=generator).prev_sample
        noise = torch.randn(x.shape, generator=torch.Generator().manual_seed(i))
        assert torch.allclose(got.sample(noise), want, atol=2e-5), int(level)


@pytest.mark.parametrize("eta", [0.0, 1.0])
def test_ddim_matches_diffusers(eta):
    objective = Diffusion(DiffusionConfig(levels=100))
    kernel = DDIM(DDIMConfig(steps=5, eta=eta, min_std=0.0), objective)
    reference = DDIMScheduler(
        num_train_timesteps=100, beta_schedule="squaredcos_cap_v2", timestep_spacing="trailing", set_alpha_to_one=True
    )
    reference.set_timesteps(5)
    x, eps, noise = torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.randn(2, 4, 3)
    grid = kernel.grid()
    for i, level in enumerate(reference.timesteps):
        got = kernel.transition(x, Prediction(target=eps), grid[i], grid[i] - grid[i + 1])
        want = reference.step(
            eps, int(level), x, eta=eta, use_clipped_model_output=True, variance_noise=noise if eta else None
        ).prev_sample
        assert torch.allclose(got.sample(noise), want, atol=2e-5), int(level)


def test_ddpm_guards_of_dppo():
    objective = Diffusion(DiffusionConfig(levels=100))
    kernel = DDPM(DDPMConfig(steps=20, train_last=10, min_std=0.1), objective)
    assert list(kernel.trained_steps) == list(range(10, 20))
    grid = kernel.grid()
    # The last step: its own std is 0, the floor applies; an action estimate of 5 is clipped to 1.
    step = kernel.transition(torch.full((1,), 5.0), Prediction(target=torch.zeros(1)), grid[19], grid[19] - grid[20])
    assert float(step.std) == pytest.approx(0.1)
    assert float(step.mean) == pytest.approx(1.0)
    assert list(DDPM(DDPMConfig(steps=20, train_last=10, min_std=0.0), objective).trained_steps) == list(range(10, 19))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (FlowSDEConfig(noise_level=0.0), "flow_ode"),
        (FlowSDEConfig(steps=1), "at least 2"),
        (FlowODEConfig(steps=0), "at least 1"),
        (FlowCPSConfig(noise_level=1.0), "between 0 and 1"),
        (FlowNoiseConfig(min_std=0.2, max_std=0.1), "min_std"),
        (DDPMConfig(), "does not fit"),
    ],
)
def test_wrong_kernels_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        build_kernel(config, FlowMatching(FlowMatchingConfig()))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DDPMConfig(steps=7), "divide"),
        (DDPMConfig(train_last=0), "train_last"),
        (DDIMConfig(eta=1.5), "eta"),
        (FlowSDEConfig(), "does not fit"),
    ],
)
def test_wrong_diffusion_kernels_are_refused(config, message):
    with pytest.raises(ValueError, match=message):
        build_kernel(config, Diffusion(DiffusionConfig()))
