"""Likelihoods of flow-matching vision-language-action models: sampling against recomputation, and what is explored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.denoising.kernels import FlowCPSConfig, FlowNoiseConfig, FlowSDEConfig, time_grid
from policies.policy import Policy, set_frozen
from policies.registry import build_policy
from tests.policies.encoding import encode
from tests.policies.pretrained.log_probs import FROZEN, log_prob_difference
from tests.policies.pretrained.toy import FLOW_POLICIES, toy
from tests.policies.test_every_policy import ROBOT, observe

TOLERANCE = 1e-5  # nats per element, float32
KERNELS: dict[str, Any] = {
    "flow_sde": FlowSDEConfig(steps=3),
    "one step": FlowSDEConfig(steps=3, random_steps="one"),
    "flow_cps": FlowCPSConfig(steps=3),
    "flow_noise": FlowNoiseConfig(steps=3),
}


@pytest.fixture(params=[(version, kernel) for version in FLOW_POLICIES for kernel in KERNELS], ids="-".join)
def policy(request: pytest.FixtureRequest) -> Policy:
    return exploring(*request.param)


def exploring(version: str, kernel: str) -> Policy:
    torch.manual_seed(0)
    made = build_policy(toy(version, KERNELS[kernel]), ROBOT)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return made.requires_grad_(False)


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_log_probs_are_those_of_the_rollout(policy: Policy, frozen: tuple[str, ...]) -> None:
    assert log_prob_difference(policy, frozen) <= TOLERANCE


def test_what_is_not_executed_follows_the_flow(policy: Policy) -> None:
    """Each step of the chain, for the elements that are not executed, is the Euler step of the network's velocity."""
    context: Any = encode(policy, observe(4))
    sample = policy.sample(context, torch.Generator().manual_seed(0))
    predict: Any = policy.predict
    trace: Any = sample.trace
    states = trace.states
    assert states.shape == (4, 4, 12, 8) and sample.log_prob.shape[2:] == (8, 3)
    rest = torch.ones(12, 8, dtype=torch.bool)
    rest[:8, :3] = False
    t = time_grid(3)[:3].expand(4, -1)
    velocity = predict(context)(states[:, :-1], t).target
    euler = states[:, :-1] - velocity / 3
    torch.testing.assert_close(states[:, 1:][..., rest], euler[..., rest], atol=1e-5, rtol=0)
    assert (states[:, 1:] - euler)[..., ~rest].abs().max() > 0.05


def test_exploring_with_the_others_noisy_too_would_not_agree() -> None:
    """What executed.py is for: the log-prob of the executed elements depends on the others' values."""
    torch.manual_seed(0)
    policy = build_policy(toy("pi0", FlowSDEConfig(steps=3)), ROBOT)
    context: Any = encode(policy, observe(2))
    sample = policy.sample(context, torch.Generator().manual_seed(0))
    trace: Any = sample.trace
    trace.states[:, 1:, 8:] += 0.3 * torch.randn_like(trace.states[:, 1:, 8:])
    assert (policy.log_prob(context, trace) - sample.log_prob).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("version", FLOW_POLICIES)
def test_the_critic_sees_the_robot_s_state(version: str) -> None:
    """Also of pi0, whose prefix does not hold it; from a kept record too."""
    torch.manual_seed(0)
    policy = build_policy(toy(version, FlowSDEConfig(steps=3)), ROBOT)
    set_frozen(policy, ("encoder",))
    obs = observe(2)
    moved = replace(obs, state=obs.state + torch.tensor([1.0, 0.0, 0.0, 0.0, 0.0]))
    records = [policy.store(encode(policy, one)) for one in (obs, moved)]
    features, others = (policy.value_features(policy.restore(record)) for record in records)
    torch.testing.assert_close((others - features)[:, -5:], torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]]).expand(2, -1))
