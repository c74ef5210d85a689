"""Denoising policies of both families with every exploring kernel."""

import dataclasses

import pytest
import torch

from episodes.sampler import Targets
from policies.audit import LogProbMismatch, audit_log_prob
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.denoise import denoise, trace_transition
from policies.denoising.kernels import (
    DDIMConfig,
    DDPMConfig,
    FlowCPSConfig,
    FlowNoise,
    FlowNoiseConfig,
    FlowODEConfig,
    FlowSDE,
    FlowSDEConfig,
    Prediction,
    Transition,
    time_grid,
)
from policies.denoising.objectives import DiffusionConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec
from sims.numbers.finite import NotFinite
from sims.vector_env import Observation, encode_instructions
from tests.policies.encoding import encode

ROBOT = RobotSpec(action_dim=3, state_dim=5, cameras=("front", "wrist"), image_size=(32, 32), control_hz=20.0)
SMALL = {
    "encoder": CompactEncoderConfig(image_widths=(16,), width=32, text_width=16),
    "expert": ActionExpertConfig(time_width=16, depth=2),
}
DIFFUSION = {"objective": DiffusionConfig(levels=20), "act": DDIMConfig(steps=5)}
EXPLORERS = {
    "flow_sde": DenoisingPolicyConfig(**SMALL),
    "one_step": DenoisingPolicyConfig(**SMALL, explore=FlowSDEConfig(random_steps="one")),
    "flow_cps": DenoisingPolicyConfig(**SMALL, explore=FlowCPSConfig()),
    "flow_noise": DenoisingPolicyConfig(**SMALL, explore=FlowNoiseConfig()),
    "action_tokens": dataclasses.replace(
        DenoisingPolicyConfig(**SMALL), expert=ActionExpertConfig(time_width=16, depth=2, action_patch=2)
    ),
    "ddpm": DenoisingPolicyConfig(**SMALL, explore=DDPMConfig(steps=10, train_last=4), **DIFFUSION),
    "ddim": DenoisingPolicyConfig(**SMALL, explore=DDIMConfig(steps=5, eta=1.0, train_last=5), **DIFFUSION),
}


def observe(batch, seed=0, words=("push the red block", "pick up the blue cube")):
    generator = torch.Generator().manual_seed(seed)
    return Observation(
        images=torch.randint(0, 256, (batch, 2, 32, 32, 3), generator=generator, dtype=torch.uint8),
        state=torch.randn(batch, 5, generator=generator),
        instruction=encode_instructions([words[i % len(words)] for i in range(batch)]),
    )


def build(config, seed=0):
    """A policy whose zero-initialized layers are shaken, so that every path through it matters."""
    torch.manual_seed(seed)
    policy = DenoisingPolicy(config, ROBOT)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    return policy


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("config", EXPLORERS.values(), ids=EXPLORERS)
def test_sample_and_recomputation_agree(config):
    policy = build(config)
    context = encode(policy, observe(6))
    sample = policy.sample(context, generator())
    steps = (
        len(policy.explore_kernel.trained_steps) if policy.config.explore != FlowSDEConfig(random_steps="one") else 1
    )
    assert sample.action.shape == (6, 8, 3)
    assert sample.trace.states.shape == (6, policy.explore_kernel.steps + 1, 8, 3)
    assert sample.log_prob.shape == (6, steps, 8, 3)
    assert sample.log_prob.dtype == torch.float32
    assert sample.action.abs().max() <= 1
    report = audit_log_prob(policy, context, sample, tolerance=1e-4)
    assert sum(row.max for row in report) < 1e-3
    # The training path against itself: the importance ratio before the first update is exactly 1.
    first, again = policy.log_prob(context, sample.trace), policy.log_prob(context, sample.trace)
    assert torch.equal((first - again.detach()).exp(), torch.ones_like(first))


@pytest.mark.parametrize("config", EXPLORERS.values(), ids=EXPLORERS)
def test_gradients_reach_the_encoder_and_the_expert(config):
    policy = build(config)
    context = encode(policy, observe(4))
    policy.log_prob(context, policy.sample(context, generator()).trace).sum().backward()
    expert = policy.expert
    for parameter in (policy.encoder.cameras[0].stem.weight, policy.encoder.text.letter.weight, expert.target.weight):
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0
    if policy.frozen_expert is not None:
        assert all(parameter.grad is None for parameter in policy.frozen_expert.parameters())


def test_every_parameter_is_trained_by_imitation():
    policy = DenoisingPolicy(dataclasses.replace(EXPLORERS["action_tokens"], max_prefix=3), ROBOT)
    shaken = build(EXPLORERS["action_tokens"])
    policy.load_state_dict(shaken.state_dict())
    action, future = torch.rand(8, 8, 3) - 0.5, torch.randn(8, 3, ROBOT.state_dim)
    policy.bc_loss(
        encode(policy, observe(8)), Targets(action=action, mask=torch.ones(8, 8), future=future), generator()
    ).backward()
    dead = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert dead == []


def test_same_generator_same_actions():
    policy = build(EXPLORERS["one_step"])
    context = encode(policy, observe(5))
    one, two, other = (policy.sample(context, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(one.trace.states, two.trace.states)
    assert torch.equal(one.trace.steps, two.trace.steps)
    assert not torch.equal(one.action, other.action)
    assert torch.equal(policy.act(context, generator(3)), policy.act(context, generator(3)))


@pytest.mark.parametrize("name", ["flow_sde", "ddim"])
def test_without_initial_noise_a_deployed_chunk_is_always_the_same(name):
    policy = build(dataclasses.replace(EXPLORERS[name], initial_noise=0.0))
    context = encode(policy, observe(5))
    chunk = policy.act(context, generator(1))
    assert torch.equal(chunk, policy.act(context, generator(2)))
    noise = torch.randn(5, *policy.spec.noise_shape)
    assert torch.equal(chunk, policy.act_from_noise(context, noise)), "what a graph computes from any noise"
    if policy.can_guide:
        previous, weights = torch.zeros_like(chunk), torch.zeros(policy.spec.action_horizon)
        guided = policy.act_guided(context, noise, previous=previous, weights=weights, jacobian="identity")
        assert torch.allclose(chunk, guided, atol=1e-5)
    drawn = build(EXPLORERS[name])
    assert not torch.equal(drawn.act(context, generator(1)), drawn.act(context, generator(2)))
    one, two = (policy.sample(context, generator(seed)) for seed in (3, 4))
    assert not one.trace.states[:, 0].any()
    assert not torch.equal(one.action, two.action), "exploration keeps the noise of its steps"


def test_one_random_step_is_drawn_per_sample_and_scored_alone():
    policy = build(EXPLORERS["one_step"])
    context = encode(policy, observe(64))
    sample = policy.sample(context, generator())
    assert len(torch.unique(sample.trace.steps)) == 4
    every = policy.log_prob(context, dataclasses.replace(sample.trace, steps=torch.arange(4).expand(64, -1)))
    chosen = every[torch.arange(64), sample.trace.steps[:, 0]].unsqueeze(1)
    assert torch.allclose(policy.log_prob(context, sample.trace), chosen, atol=1e-4)
    # All other transitions follow the ODE: x_next - x = -dt v.
    grid = time_grid(4)
    row, step = 0, int(sample.trace.steps[0, 0])
    for i in range(4):
        x, x_next = sample.trace.states[row : row + 1, i], sample.trace.states[row : row + 1, i + 1]
        velocity = policy.predict(context[row : row + 1])(x.unsqueeze(1), grid[i].view(1, 1)).target.squeeze(1)
        assert torch.allclose(x_next, x - 0.25 * velocity, atol=1e-5) == (i != step)


def test_rows_of_a_batch_do_not_influence_each_other():
    policy = build(EXPLORERS["action_tokens"])
    obs = observe(6)
    context = encode(policy, obs)
    sample = policy.sample(context, generator())
    whole = policy.log_prob(context, sample.trace)
    order = torch.tensor([4, 1, 5])
    part = policy.log_prob(encode(policy, obs[order]), sample.trace[order])
    assert torch.allclose(whole[order], part, atol=2e-4)


def test_entropy_is_that_of_the_transition():
    policy = build(EXPLORERS["flow_sde"])
    context = encode(policy, observe(3))
    path = policy.sample(context, generator()).trace
    std = torch.tensor([0.5, 0.4330127, 0.25, 0.1443376])
    expected = torch.distributions.Normal(0.0, std).entropy()[None, :, None, None].expand(3, -1, 8, 3)
    assert torch.allclose(policy.entropy(context, path), expected, atol=1e-5)
    learned = build(EXPLORERS["flow_noise"])
    context = encode(learned, observe(3))
    learned.entropy(context, path).mean().backward()
    assert learned.expert.noise.weight.grad.abs().max() > 0


def test_dppo_early_steps_are_frozen():
    policy = build(EXPLORERS["ddpm"])
    policy.prepare_to_explore()  # the frozen copy is taken from the weights as they are now
    context = encode(policy, observe(4)).detach()
    before = policy.sample(context, generator()).trace
    assert before.steps.tolist() == [[6, 7, 8, 9]] * 4
    with torch.no_grad():
        policy.expert.target.bias += 1.0
    after = policy.sample(context, generator()).trace
    assert torch.equal(before.states[:, :7], after.states[:, :7])
    assert not torch.allclose(before.states[:, 7:], after.states[:, 7:])


def test_dppo_early_steps_do_not_follow_a_trained_encoder():
    policy = build(EXPLORERS["ddpm"])
    policy.prepare_to_explore()
    obs = observe(4)
    before = policy.sample(encode(policy, obs), generator()).trace
    with torch.no_grad():
        for parameter in policy.encoder.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    after = policy.sample(encode(policy, obs), generator()).trace
    assert torch.equal(before.states[:, :7], after.states[:, :7])
    assert not torch.allclose(before.states[:, 7:], after.states[:, 7:])


@pytest.mark.parametrize("config", EXPLORERS.values(), ids=EXPLORERS)
def test_only_draws_that_reach_nothing_executed_are_not_counted(config):
    """Counted: every element whose draw moves the actions that run, here the first two of the chunk."""
    policy, executed = build(config), 2
    context = encode(policy, observe(6))
    trace = policy.sample(context, generator()).trace
    counted = policy.counted(trace, torch.full((6,), executed))
    assert counted.shape == (6, policy.log_prob_steps, 8)
    assert counted[:, :, :executed].all()
    kernel, predict, grid = policy.explore_kernel, policy.predict(context), policy.explore_kernel.grid()
    for i, row in enumerate(trace.steps[0].tolist()):
        draw = trace.states[:, row + 1].clone().requires_grad_()
        x_t = draw.unsqueeze(1)
        for step in range(row + 1, kernel.steps):
            t, dt = grid[step].view(1, 1), (grid[step] - grid[step + 1]).view(1, 1)
            x_t = kernel.transition(x_t, predict(x_t, t), t[..., None, None], dt[..., None, None]).mean
        gradient = torch.autograd.grad(x_t[0, 0, :executed].sum(), draw)[0][0]
        moves = gradient.abs().amax(-1) > 0
        assert torch.equal(counted[0, i], moves)


class ShiftedGrid(FlowSDE):
    """Plant: the sampler's grid is linspace(1, 0, K) though K + 1 times are needed, the update's is right."""

    sampling = False

    def grid(self, device="cpu"):
        right = super().grid(device)
        return torch.cat([torch.linspace(1, 1 / self.steps**2, self.steps), right[-1:]]) if self.sampling else right


class ClampedStd(FlowNoise):
    """Plant: the std is clamped while sampling and not while scoring."""

    sampling = False

    def transition(self, x_t, prediction, t, dt, explore=None):
        right = super().transition(x_t, prediction, t, dt, explore)
        return Transition(mean=right.mean, std=right.std.clamp(min=0.12)) if self.sampling else right


class NoLastStd(FlowSDE):
    """Plant: the last step is deterministic in both paths, so its log-prob is not a number."""

    def transition(self, x_t, prediction, t, dt, explore=None):
        right = super().transition(x_t, prediction, t, dt, explore)
        return Transition(mean=right.mean, std=torch.where(t - dt > 0, right.std, 0.0))


@pytest.mark.parametrize(
    ("name", "kernel"),
    [("flow_sde", ShiftedGrid(FlowSDEConfig())), ("flow_noise", ClampedStd(FlowNoiseConfig()))],
)
def test_audit_catches_a_rollout_that_differs_from_the_update(name, kernel):
    policy = build(EXPLORERS[name])
    context = encode(policy, observe(8))
    policy.explore_kernel = kernel
    audit_log_prob(policy, context, policy.sample(context, generator()), tolerance=1e-4)
    kernel.sampling = True
    sample = policy.sample(context, generator())
    kernel.sampling = False
    with pytest.raises(LogProbMismatch, match=r"stochastic step \d: .* differs from the rollout's by up to"):
        audit_log_prob(policy, context, sample)


def test_audit_names_the_step_without_density():
    policy = build(EXPLORERS["flow_sde"])
    context = encode(policy, observe(8))
    policy.explore_kernel = NoLastStd(FlowSDEConfig())
    with pytest.raises(NotFinite, match=r"log_prob of the rollout is nan .*denoising step 3"):
        audit_log_prob(policy, context, policy.sample(context, generator()))


def test_committed_prefix_is_kept_and_seen():
    policy = build(dataclasses.replace(EXPLORERS["action_tokens"], max_prefix=3))
    context = encode(policy, observe(4))
    prefix = torch.rand(4, 3, 3) - 0.5
    free, bound = policy.act(context, generator()), policy.act(context, generator(), prefix)
    assert torch.equal(bound[:, :3], prefix)
    assert not torch.allclose(bound[:, 3:], free[:, 3:], atol=1e-3)
    assert torch.allclose(policy.act(context, generator(), prefix[:, :0]), free, atol=1e-5)
    with pytest.raises(ValueError, match="max_prefix 3"):
        policy.act(context, generator(), torch.zeros(4, 4, 3))


def test_prefix_training_counts_the_postfix_only():
    """Only action 0 is valid: the loss is 0 exactly when it falls in the prefix, d ~ U{0..7}, so 7 times in 8."""
    policy = build(dataclasses.replace(EXPLORERS["flow_sde"], max_prefix=7, anchor_weight=0.0, loss_draws=1))
    context = encode(policy, observe(1)).detach()
    mask = torch.zeros(1, 8)
    mask[:, 0] = 1
    shared = generator()
    with torch.no_grad():
        losses = torch.stack(
            [policy.bc_loss(context, Targets(action=torch.zeros(1, 8, 3), mask=mask), shared) for _ in range(400)]
        )
    assert float((losses == 0).float().mean()) == pytest.approx(7 / 8, abs=0.05)


def test_padding_does_not_count():
    policy = build(EXPLORERS["flow_sde"])
    context = encode(policy, observe(4)).detach()
    action, mask = torch.rand(4, 8, 3) - 0.5, torch.ones(4, 8)
    assert policy.bc_loss(context, Targets(action=action, mask=torch.zeros(4, 8)), generator()).item() == 0
    # A padded row changes nothing: three rows alone give the loss of four with one masked, in the anchor's part.
    regression = dataclasses.replace(EXPLORERS["flow_sde"], anchor_weight=1e6)
    policy = build(regression)
    context = encode(policy, observe(4)).detach()
    mask[3] = 0
    masked = policy.bc_loss(context, Targets(action=action, mask=mask), generator()).item()
    alone = policy.bc_loss(context[:3], Targets(action=action[:3], mask=mask[:3]), generator()).item()
    assert masked == pytest.approx(alone, rel=1e-4)


def test_value_features_are_detached():
    policy = build(EXPLORERS["flow_sde"])
    features = policy.value_features(encode(policy, observe(4)))
    assert features.shape == (4, policy.spec.value_dim)
    assert not features.requires_grad


def test_untrained_policy_starts_from_its_anchor():
    """Zero-initialized layers: the ODE from noise ends near the anchor, with the spread of the assumed actions."""
    torch.manual_seed(0)
    policy = DenoisingPolicy(DenoisingPolicyConfig(**SMALL, act=FlowODEConfig(steps=40)), ROBOT)
    context = encode(policy, observe(1))[torch.zeros(1500, dtype=torch.int64)].detach()
    anchor = policy._prefill(context[:1].encoding, policy.expert).anchor[0, 0]
    path, _ = denoise(
        policy.predict(context), policy.act_kernel, torch.randn(1500, 8, 3, generator=generator()), generator()
    )
    assert torch.allclose(path.states[:, -1].mean(0), anchor, atol=0.05)
    assert float(path.states[:, -1].std(0).mean()) == pytest.approx(0.5, abs=0.02)


def test_scoring_costs_one_network_call():
    calls = []

    def predict(x_t, t):
        calls.append(x_t.shape)
        return Prediction(target=torch.zeros_like(x_t))

    kernel = FlowSDE(FlowSDEConfig())
    path, _ = denoise(predict, kernel, torch.randn(5, 8, 3), generator())
    calls.clear()
    trace_transition(predict, kernel, path)
    assert calls == [(5, 4, 8, 3)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"explore": DDIMConfig()}, "does not fit"),
        ({"objective": DiffusionConfig(), "act": DDIMConfig(), "explore": DDIMConfig()}, "explore must be stochastic"),
        ({"objective": DiffusionConfig(), "act": DDIMConfig(eta=1.0), "explore": DDPMConfig()}, "act must be"),
        ({"max_prefix": 8}, "max_prefix"),
    ],
)
def test_wrong_configs_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        DenoisingPolicy(dataclasses.replace(EXPLORERS["flow_sde"], **change), ROBOT)
