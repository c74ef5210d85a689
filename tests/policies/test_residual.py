"""A residual on any base: what is executed, the base's queue, and the contract of policies.policy.Policy."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributions import Normal, TanhTransform, TransformedDistribution

from policies.audit import audit_log_prob
from policies.bundle import load_bundle, save_bundle
from policies.normalizer import in_units
from policies.policy import Policy, copy_trained, set_frozen, trained_parameters
from policies.pretrained.convention import Convention
from policies.registry import build_policy
from policies.residual.critic_guided import CriticGuided
from policies.residual.policy import ResidualConfig, ResidualPolicy, SquashedNoiseConfig, residual_on
from sims.errors import UserError
from tests.policies.protocols import check_protocols
from tests.policies.small_configs import CONFIGS, ENCODER
from tests.policies.test_every_policy import ROBOT, generator, observe

SQUASHED = ResidualConfig(action_horizon=2, hidden=(32,), noise=SquashedNoiseConfig(std=0.4))
RESIDUALS = {
    "fixed": ResidualConfig(action_horizon=2, hidden=(32,)),
    "squashed": SQUASHED,
    "own encoder": dataclasses.replace(SQUASHED, encoder=ENCODER),
}
BASES = ("denoising", "categorical", "gaussian", "diffusion_policy", "openvla")


def base_of(name: str) -> Policy[Any, Any]:
    torch.manual_seed(0)
    return build_policy(CONFIGS[name], ROBOT)


def trained(config: ResidualConfig, base: str = "gaussian") -> ResidualPolicy:
    """With weights that are not zero."""
    policy = residual_on(base_of(base), config)
    with torch.no_grad():
        for parameter in trained_parameters(policy):
            parameter += 0.1 * torch.randn_like(parameter)
    return policy


@pytest.mark.parametrize("name", BASES)
def test_untrained_it_executes_the_base_chunk_by_chunk(name: str) -> None:
    """Two of eight actions at a time; the base sees only the observations at which it plans."""
    base = base_of(name)
    policy = residual_on(base, RESIDUALS["fixed"])
    memory, state = base.initial_state(3), policy.initial_state(3)
    for round_ in range(2):
        context, memory = base.encode(observe(3, 4 * round_), memory)
        chunk = base.act_from_noise(context, torch.zeros(3, *base.spec.noise_shape))
        for part in range(4):
            own, state = policy.encode(observe(3, 4 * round_ + part), state)
            action = policy.act(own, generator())
            torch.testing.assert_close(action, chunk[:, 2 * part : 2 * part + 2].clamp(-1, 1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("around", ["base", "middle"])
def test_the_units_are_the_robots_where_the_bases_actions_are_not(around: Any) -> None:
    """The checkpoint's actions are relative to the state, whose mean is -3: their scale says nothing of the robot's."""
    base: Any = build_policy(dataclasses.replace(CONFIGS["pi0"], convention=Convention(relative_actions=2)), ROBOT)
    base.normalizer.set_scale("action", torch.full((ROBOT.action_dim,), 3.0), torch.full((ROBOT.action_dim,), 0.5))
    base.normalizer.set_scale("state", torch.full((ROBOT.state_dim,), -3.0), torch.full((ROBOT.state_dim,), 2.0))
    action = torch.rand(4, ROBOT.action_dim)
    assert torch.equal(in_units(base, action), action)
    policy = residual_on(base, dataclasses.replace(SQUASHED, around=around, scale=1.0))
    assert torch.equal(in_units(policy, action), action) and (policy.action_scale == 1).all()
    assert (policy.normalizer.state_mean == -3).all() and (base.normalizer.action_center == 3).all()
    context, _ = policy.encode(observe(3), policy.initial_state(3))
    if around == "middle":
        assert (context.center == 0).all() and policy.sample(context, generator()).action.std() > 0.1


def test_a_reset_environment_gets_a_new_chunk_and_the_others_go_on() -> None:
    policy = residual_on(base_of("denoising"), RESIDUALS["fixed"])
    initial = policy.initial_state(3)
    _, state = policy.encode(observe(3, 0), initial)
    state = initial.where(torch.tensor([False, True, False]), state)
    context, after = policy.encode(observe(3, 1), state)
    fresh, _ = policy.encode(observe(3, 1), initial)
    assert torch.equal(context.center[1], fresh.center[1])
    assert torch.equal(context.center[0], state.chunk[0, 2:4])
    assert after.used.tolist() == [4, 2, 4]


@pytest.mark.parametrize("name", RESIDUALS)
def test_the_sum_is_clipped(name: str) -> None:
    policy = trained(dataclasses.replace(RESIDUALS[name], scale=0.3))
    with torch.no_grad():
        policy.head[-1].bias += 20.0
    context, _ = policy.encode(observe(4), policy.initial_state(4))
    action = policy.act(context, generator())
    torch.testing.assert_close(action, (context.center + 0.3).clamp(max=1.0))
    assert policy.sample(context, generator()).action.abs().max() <= 1


def test_around_the_middle_leaves_the_base_out() -> None:
    policy = residual_on(base_of("gaussian"), ResidualConfig(around="middle", scale=1.0, action_horizon=3))
    policy.fit_normalizer(torch.randn(9, 5), torch.tensor([[0.1, -0.4, 0.0], [0.3, 0.4, 0.0]]))
    context, _ = policy.encode(observe(4), policy.initial_state(4))
    torch.testing.assert_close(policy.act(context, generator()), torch.tensor([0.2, 0.0, 0.0]).expand(4, 3, 3))


def test_around_noise_the_base_makes_its_chunk_from_what_is_chosen() -> None:
    base = base_of("denoising")
    chosen = ResidualConfig(around="noise", scale=1.5, action_horizon=8, hidden=(16,), noise=SquashedNoiseConfig())
    policy = residual_on(base, chosen)
    context, _ = policy.encode(observe(4), policy.initial_state(4))
    base_context, _ = base.encode(observe(4), base.initial_state(4))
    torch.testing.assert_close(
        policy.act(context, generator()), base.act_from_noise(base_context, torch.zeros(4, 8, 3))
    )
    sample = policy.sample(context, generator())
    noise = policy.critic_action(sample.trace, sample.action)
    torch.testing.assert_close(noise, 1.5 * sample.trace.x.tanh())
    torch.testing.assert_close(sample.action, base.act_from_noise(base_context, noise))
    counted = policy.counted(sample.trace, torch.tensor([8, 3, 1, 0]))
    assert counted.tolist() == [[[ran] * 8] for ran in (True, True, True, False)]  # the base mixes all of it
    stored = policy.store(context)
    assert stored.base is None
    torch.testing.assert_close(policy.rsample(policy.restore(stored), generator())[0][0], noise)
    with pytest.raises(ValueError, match=r"must be the chunk of the base around noise, 8"):
        residual_on(base, dataclasses.replace(chosen, action_horizon=4))
    with pytest.raises(ValueError, match=r"at most 1 around 'base', got 1.5"):
        ResidualConfig(scale=1.5)


@pytest.mark.parametrize("fitted", [False, True])
def test_around_noise_the_residual_s_own_encoder_reads_standardized_states(fitted: bool) -> None:
    base, state = base_of("denoising"), 100 + 30 * torch.randn(500, 5, generator=generator())
    base.fit_normalizer(state, 2 * torch.rand(500, 3) - 1)
    chosen = ResidualConfig(around="noise", scale=1.5, action_horizon=8, noise=SquashedNoiseConfig(), encoder=ENCODER)
    policy = residual_on(base, chosen)
    if fitted:
        state = state + 50
        policy.fit_normalizer(state, 2 * torch.rand(500, 3) - 1)
    seen = policy.normalizer.normalize_state(state)
    torch.testing.assert_close(seen.mean(0), torch.zeros(5), atol=1e-4, rtol=0)
    torch.testing.assert_close(seen.std(0, correction=0), torch.ones(5), atol=1e-4, rtol=0)
    assert (policy.action_scale == 1).all() and (policy.normalizer.action_center == 0).all()


@pytest.mark.parametrize("base", ["gaussian", "without noise"])
def test_of_a_base_that_acts_without_noise_none_can_be_chosen(base: str) -> None:
    chosen = ResidualConfig(around="noise", scale=1.5, action_horizon=None, noise=SquashedNoiseConfig())
    config = CONFIGS[base] if base in CONFIGS else dataclasses.replace(CONFIGS["denoising"], initial_noise=0.0)
    with pytest.raises(UserError, match=r"acts without noise: start from .* with start\.policy\.initial_noise above 0"):
        residual_on(build_policy(config, ROBOT), chosen)


def test_corrections_are_measured_by_the_range_of_the_demonstrations() -> None:
    """The base's scales are taken over; a dimension that hardly moves is hardly corrected."""
    base = base_of("gaussian")
    base.fit_normalizer(torch.randn(9, 5), torch.tensor([[-0.5, -0.01, 0.0], [0.5, 0.01, 0.2]]))
    policy = residual_on(base, dataclasses.replace(RESIDUALS["fixed"], scale=0.3))
    with torch.no_grad():
        policy.head[-1].bias += 20.0
    context, _ = policy.encode(observe(4), policy.initial_state(4))
    moved = policy.act(context, generator()) - context.center
    torch.testing.assert_close(moved[:, 0], torch.tensor([0.15, 0.003, 0.03]).expand(4, 3))


@pytest.mark.parametrize("name", RESIDUALS)
def test_a_sample_scores_as_it_was_drawn_also_from_a_stored_record(name: str) -> None:
    policy = trained(RESIDUALS[name])
    _, state = policy.encode(observe(6, 1), policy.initial_state(6))
    context, _ = policy.encode(observe(6), state)
    sample = policy.sample(context, generator())
    audit_log_prob(policy, context, sample, tolerance=1e-4)
    order = torch.tensor([4, 1, 5])
    restored = policy.restore(policy.store(context)[order])
    torch.testing.assert_close(policy.log_prob(restored, sample.trace[order]), sample.log_prob[order])
    assert policy.value_features(restored).shape == (3, policy.spec.value_dim)
    entropy = policy.entropy(context, sample.trace)
    assert entropy.shape == sample.log_prob.shape and entropy.requires_grad == policy.learns_spread


def test_log_probs_are_those_of_a_squashed_gaussian() -> None:
    policy = trained(SQUASHED)
    context, _ = policy.encode(observe(5), policy.initial_state(5))
    action, log_prob = (drawn[0] for drawn in policy.rsample(context, generator()))
    inside = policy._distribution(context)
    exact = TransformedDistribution(Normal(inside.mean, inside.stddev), [TanhTransform()])
    drawn = policy.sample(context, generator()).trace.x
    torch.testing.assert_close(log_prob, exact.log_prob(drawn.tanh()), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(action, (context.center + 0.2 * drawn.tanh()).clamp(-1, 1))


def test_the_entropy_of_a_squashed_gaussian_has_the_gradient_of_its_draws() -> None:
    """That of -log p at a draw held fixed is zero in the mean, whatever the distribution."""
    policy = trained(SQUASHED)
    set_frozen(policy, ())
    context, _ = policy.encode(observe(5), policy.initial_state(5))
    trace = policy.sample(context, generator()).trace
    entropy, log_prob = policy.entropy(context, trace).mean(), policy.rsample(context, generator())[1].mean()
    torch.testing.assert_close(entropy, -log_prob, atol=1e-5, rtol=1e-4)
    weights = policy.parameter_groups()["residual"]
    found, exact = (torch.autograd.grad(loss, weights, allow_unused=True) for loss in (entropy, -log_prob))
    for one, other in zip(found, exact, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-3)
    assert exact[-1] is not None and exact[-1].abs().max() > 1e-3


@pytest.mark.parametrize("name", RESIDUALS)
def test_the_actor_s_gradient_reaches_the_residual_alone_and_the_critic_s_the_encoder(name: str) -> None:
    policy = trained(RESIDUALS[name])
    assert isinstance(policy, CriticGuided)
    check_protocols(policy)
    set_frozen(policy, ())
    context = policy.restore(policy.store(policy.encode(observe(4), policy.initial_state(4))[0]))
    policy.rsample(context, generator())[0].sum().backward()
    groups = policy.parameter_groups()
    assert all(parameter.grad is not None for parameter in groups["residual"])
    assert all(parameter.grad is None for parameter in [*policy.base.parameters(), *groups.get("encoder", ())])
    if "encoder" in groups:
        policy.critic_features(context).sum().backward()
        assert any(parameter.grad is not None for parameter in groups["encoder"])
    assert all(parameter.grad is None for parameter in policy.base.parameters())


@pytest.mark.parametrize("base", BASES)
def test_a_bundle_brings_it_back(base: str, tmp_path: Path) -> None:
    policy = trained(RESIDUALS["squashed"], base)
    save_bundle(policy, tmp_path)
    loaded = load_bundle(tmp_path, robot=ROBOT)
    assert loaded.config == policy.config and loaded.spec == policy.spec
    contexts = [one.encode(observe(3), one.initial_state(3))[0] for one in (loaded, policy)]
    assert torch.equal(*[one.act(c, generator()) for one, c in zip((loaded, policy), contexts, strict=True)])
    copied = copy_trained(policy)
    assert all(a is b for a, b in zip(policy.base.parameters(), copied.base.parameters(), strict=True))


def test_what_cannot_be_corrected_is_refused() -> None:
    with pytest.raises(ValueError, match=r"residual.action_horizon \(3\) must divide the chunk of the base, 8"):
        residual_on(base_of("gaussian"), ResidualConfig(action_horizon=3))
    with pytest.raises(UserError, match=r"has a residual already.*leave start\.residual out"):
        residual_on(trained(SQUASHED), SQUASHED)
