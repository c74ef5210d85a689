"""A policy that is told what is good: it starts as its base, learns both, acts as the good, guided or not."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from episodes.sampler import Targets
from policies.bundle import load_bundle, save_bundle
from policies.denoising.denoise import between
from policies.denoising.kernels import DDIMConfig, DDPMConfig, Prediction
from policies.denoising.objectives import DiffusionConfig
from policies.policy import Policy, set_frozen, trained_parameters
from policies.registry import build_policy
from policies.residual.conditioned import GOOD, NOT_GOOD, UNLABELED, ConditionedPolicy, conditioned
from policies.residual.policy import ResidualConfig, residual_on
from sims.errors import UserError
from tests.policies.small_configs import CONFIGS
from tests.policies.test_every_policy import ROBOT, generator, observe

DENOISING = ("denoising", "diffusion_policy", "diffusion_transformer", "pi0", "pi05", "smolvla")
B = 4


def base_of(name: str, **settings: Any) -> Policy[Any, Any]:
    torch.manual_seed(0)
    return build_policy(dataclasses.replace(CONFIGS[name], **settings), ROBOT)


def told(policy: ConditionedPolicy, spread: float) -> ConditionedPolicy:
    """With embeddings that are not zero."""
    with torch.no_grad():
        policy.labels.copy_(spread * torch.randn(policy.labels.shape, generator=generator(3)))
    return policy


@torch.no_grad()
def acted(policy: Policy[Any, Any], context: Any) -> Tensor:
    noise = torch.randn(B, *policy.spec.noise_shape, generator=generator(1))
    return policy.act_from_noise(context, noise)


@pytest.mark.parametrize("name", DENOISING)
@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_a_new_one_acts_as_its_base_and_labels_change_that(name: str, guidance: float) -> None:
    base = base_of(name)
    policy = conditioned(base, guidance=guidance)
    context, _ = policy.encode(observe(B), policy.initial_state(B))
    torch.testing.assert_close(acted(policy, context), acted(base, context), atol=1e-5, rtol=0)
    targets = Targets(
        action=0.1 * torch.randn(B, base.spec.cloned_horizon, ROBOT.action_dim, generator=generator(2)),
        mask=torch.ones(B, base.spec.cloned_horizon),
    )
    label = torch.tensor([GOOD, NOT_GOOD, UNLABELED, UNLABELED])
    loss = policy.labelled_loss(context, targets, label, generator())
    torch.testing.assert_close(loss, base.bc_loss(context, targets, generator()), atol=1e-6, rtol=1e-5)
    if name not in ("denoising", "pi05"):  # whose gates start at zero: the gradient comes with the first update
        (gradient,) = torch.autograd.grad(loss, policy.labels)
        assert (gradient.abs().sum(1) > 0).all()


@pytest.mark.parametrize("name", DENOISING)
def test_guidance_goes_on_from_what_is_done_without_a_label(name: str) -> None:
    """0 is what is done without a label, 1 what is good, and in between and beyond it is another chunk."""
    base = base_of(name)
    policy = told(conditioned(base, guidance=1.0), spread=0.05)
    if name in ("denoising", "pi05"):  # whose output does not depend on anything yet
        with torch.no_grad():
            for parameter in policy.base.parameters():
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator(4))
        base = policy.base
    context, _ = policy.encode(observe(B), policy.initial_state(B))
    plain, good = acted(base, context), acted(policy, context)
    assert (good - plain).abs().max() > 1e-3
    torch.testing.assert_close(acted(conditioned(policy, guidance=0.0), context), plain, atol=1e-5, rtol=0)
    beyond = acted(conditioned(policy, guidance=2.0), context)
    assert ((beyond - good) * (good - plain)).sum() > 0


def test_a_prediction_between_two_is_their_weighted_sum() -> None:
    def first(x_t: Tensor, t: Tensor) -> Prediction:
        return Prediction(target=x_t)

    def second(x_t: Tensor, t: Tensor) -> Prediction:
        return Prediction(target=3 * x_t + t)

    x_t, t = torch.ones(2, 1, 3, 1), torch.full((2, 1), 0.5)
    assert (between(first, second, 2.0)(x_t, t[..., None, None]).target == 2 * 3.5 - 1).all()


def test_it_learns_both_and_acts_as_the_good() -> None:
    """Of one observation: half of the chunks are good and up, half not and down; a fifth of the labels is dropped."""
    policy = conditioned(base_of("denoising"), guidance=1.0)
    set_frozen(policy, ["encoder"])
    context, _ = policy.encode(observe(1), policy.initial_state(1))
    record = policy.store(context).map(lambda tensor: tensor.expand(64, *tensor.shape[1:]))
    label = (torch.arange(64) % 2).long()
    action = (label.float() - 0.5)[:, None, None].expand(-1, policy.spec.action_horizon, ROBOT.action_dim)
    targets = Targets(action=action, mask=torch.ones(action.shape[:2]))
    optimizer = torch.optim.Adam(trained_parameters(policy), lr=3e-3)
    noise = generator()
    for _ in range(150):
        kept = torch.rand(64, generator=noise) > 0.2
        loss = policy.labelled_loss(policy.restore(record), targets, torch.where(kept, label, UNLABELED), noise)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    context, drawn = policy.restore(record), torch.randn(64, *policy.spec.noise_shape, generator=noise)
    with torch.no_grad():
        good = policy.act_from_noise(context, drawn).mean((1, 2))
        not_good = policy.base.act_from_noise(policy.labelled(context, torch.full((64,), NOT_GOOD)), drawn).mean((1, 2))
        unsaid = policy.base.act_from_noise(context, drawn).mean((1, 2))
        guided = conditioned(policy, guidance=1.5).act_from_noise(context, drawn).mean((1, 2))
    assert good.mean() > 0.35 and not_good.mean() < -0.35
    assert unsaid.min() < -0.2 and unsaid.max() > 0.2
    assert guided.mean() > good.mean() + 0.02


def test_a_bundle_brings_it_back_with_its_labels(tmp_path: Path) -> None:
    policy = told(conditioned(base_of("denoising"), guidance=1.5), spread=1.0)
    save_bundle(policy, tmp_path)
    loaded = load_bundle(tmp_path, robot=ROBOT)
    assert isinstance(loaded, ConditionedPolicy) and (loaded.config, loaded.spec) == (policy.config, policy.spec)
    context, _ = policy.encode(observe(B), policy.initial_state(B))
    assert torch.equal(acted(loaded, context), acted(policy, context))
    again = conditioned(loaded, guidance=1.0)
    assert torch.equal(again.labels, policy.labels) and again.config.guidance == 1.0


def test_what_is_explored_scores_under_the_good_label() -> None:
    policy = told(conditioned(base_of("denoising"), guidance=1.0), spread=1.0)
    context, _ = policy.encode(observe(B), policy.initial_state(B))
    sample = policy.sample(context, generator())
    torch.testing.assert_close(policy.log_prob(context, sample.trace), sample.log_prob, atol=1e-4, rtol=1e-4)


DPPO: dict[str, dict[str, Any]] = {
    "denoising": {"objective": DiffusionConfig(), "act": DDIMConfig(steps=4, train_last=1)},
    "diffusion_policy": {},
    "diffusion_transformer": {},
}


@pytest.mark.parametrize("name", DPPO)
@pytest.mark.parametrize("frozen", [(), ("encoder",)])
def test_steps_that_are_not_trained_are_explored_under_the_good_label_too(name: str, frozen: tuple[str, ...]) -> None:
    """DPPO's copy, which encodes the observation again where the encoder is trained."""
    base: Any = base_of(name, **DPPO[name], explore=DDPMConfig(steps=4, train_last=2))
    with torch.no_grad():
        for parameter in base.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator(4))
    policy = told(conditioned(base, guidance=1.0), spread=1.0)
    policy.prepare_to_explore()
    set_frozen(policy, frozen)
    context, _ = policy.encode(observe(B), policy.initial_state(B))
    good = policy.labelled(context, torch.full((B,), GOOD))
    x_t, t = torch.randn(B, 1, *policy.spec.noise_shape, generator=generator(5)), torch.full((B, 1), 0.5)
    inner: Any = policy.base
    plain, labelled = (inner.frozen_predict(one)(x_t, t).target for one in (context, good))
    torch.testing.assert_close(labelled, inner.predict(good)(x_t, t).target)
    assert (labelled - plain).abs().max() > 1e-3


def test_what_cannot_be_told_is_refused() -> None:
    for name in ("gaussian", "categorical"):
        with pytest.raises(UserError, match=rf"a {name} cannot be conditioned: set recap.condition to null"):
            conditioned(base_of(name), guidance=1.0)
    with pytest.raises(UserError, match=r"a residual already cannot be conditioned"):
        conditioned(residual_on(base_of("gaussian"), ResidualConfig(action_horizon=2)), guidance=1.0)
