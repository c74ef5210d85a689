"""The best of a policy's samples: which is chosen, prefixes, bundles, what is refused."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.bundle import load_bundle, save_bundle
from policies.policy import Policy
from policies.registry import build_policy
from policies.residual.best_of import BestOfPolicy, best_of
from policies.residual.ensemble import EnsembleConfig
from policies.residual.policy import ResidualConfig, residual_on
from sims.errors import UserError
from tests.policies.small_configs import CONFIGS
from tests.policies.test_every_policy import ROBOT, generator, observe

LINEAR = EnsembleConfig(hidden=(), members=2, least_of=1, trunk_width=None, layer_norm=False)
BASES = ("denoising", "diffusion_policy", "pi0")


def base_of(name: str, **settings: Any) -> Policy[Any, Any]:
    torch.manual_seed(0)
    return build_policy(dataclasses.replace(CONFIGS[name], **settings), ROBOT)


def prefers_the_first_number(base: Policy[Any, Any], *, samples: int) -> BestOfPolicy:
    """Members value 3 and -1 times the first number of a chunk: the mean is that number."""
    policy = best_of(base, samples=samples, critic=LINEAR)
    with torch.no_grad():
        weight = policy.critic.members[-1].weight
        assert isinstance(weight, Tensor)
        weight[:, base.spec.value_dim] = torch.tensor([[3.0], [-1.0]])
    return policy


@pytest.mark.parametrize("name", BASES)
def test_the_sample_with_the_largest_mean_value_is_chosen(name: str) -> None:
    base = base_of(name)
    policy = prefers_the_first_number(base, samples=5)
    context, _ = policy.encode(observe(4), policy.initial_state(4))
    noise = torch.randn(4, 5, *base.spec.noise_shape, generator=generator())
    with torch.no_grad():
        proposed = torch.stack([base.act_from_noise(context, noise[:, i]) for i in range(5)], dim=1)
        chosen = policy.act_from_noise(context, noise.flatten(1, 2))
    best = proposed[:, :, 0, 0].argmax(1)
    assert len(best.unique()) > 1
    torch.testing.assert_close(chosen, proposed[torch.arange(4), best], atol=1e-5, rtol=0)


def test_exploring_and_deployed_it_acts_alike_and_scores_nothing() -> None:
    policy = prefers_the_first_number(base_of("denoising"), samples=3)
    context, _ = policy.encode(observe(4), policy.initial_state(4))
    sample = policy.sample(context, generator())
    assert torch.equal(sample.action, policy.act(context, generator()))
    assert sample.log_prob.shape == (4, 0, *sample.action.shape[1:])
    assert policy.counted(sample.trace, torch.full((4,), 2)).numel() == 0  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"has no likelihood: it is trained by algorithm off_policy with best_of"):
        policy.log_prob(context, sample.trace)  # type: ignore[arg-type]


def test_one_sample_is_the_base() -> None:
    base = base_of("denoising")
    policy = prefers_the_first_number(base, samples=1)
    context, _ = base.encode(observe(4), base.initial_state(4))
    torch.testing.assert_close(policy.act(context, generator()), base.act(context, generator()))


def test_committed_actions_are_kept_and_the_rest_is_chosen() -> None:
    policy = prefers_the_first_number(base_of("denoising", max_prefix=3), samples=4)
    context, _ = policy.encode(observe(4), policy.initial_state(4))
    prefix = 0.1 * torch.randn(4, 2, ROBOT.action_dim, generator=generator())
    action = policy.act(context, generator(), prefix)
    torch.testing.assert_close(action[:, :2], prefix)


def test_a_bundle_brings_it_back_with_its_critic(tmp_path: Path) -> None:
    policy = prefers_the_first_number(base_of("denoising"), samples=4)
    policy.critic.feature_std.fill_(2.0)
    save_bundle(policy, tmp_path)
    loaded = load_bundle(tmp_path, robot=ROBOT)
    assert isinstance(loaded, BestOfPolicy) and (loaded.config, loaded.spec) == (policy.config, policy.spec)
    context, _ = policy.encode(observe(4), policy.initial_state(4))
    assert torch.equal(loaded.act(context, generator()), policy.act(context, generator()))
    assert best_of(loaded, samples=4, critic=LINEAR) is loaded


def test_what_cannot_be_chosen_from_is_refused() -> None:
    base = base_of("gaussian")
    policy = best_of(base, samples=4, critic=LINEAR)
    with pytest.raises(UserError, match=r"chooses already, by .* among 4 samples"):
        best_of(policy, samples=8, critic=LINEAR)
    with pytest.raises(UserError, match=r"is a best_of already gets no residual"):
        residual_on(policy, ResidualConfig(action_horizon=2))
    with pytest.raises(UserError, match=r"is a residual already is not chosen from"):
        best_of(residual_on(base, ResidualConfig(action_horizon=2)), samples=4, critic=LINEAR)
