"""What is predicted from fake tensors, beside what real ones take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.denoising.kernels import FlowNoiseConfig, FlowSDEConfig
from policies.policy import set_frozen, trained_parameters
from policies.registry import build_policy
from tests.policies.encoding import encode
from tests.policies.pretrained.toy import toy
from tests.policies.small_configs import CONFIGS
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.memory import policy_memory, training_memory
from vla_rl.bench.policy import observations


@pytest.mark.parametrize(
    ("frozen", "stored"),
    [(("encoder",), "float32"), (("encoder",), "bfloat16"), ((), "float32")],
    ids=["expert", "expert, half precision", "all"],
)
def test_weights_gradients_and_optimizer_are_predicted_to_the_byte(frozen: tuple[str, ...], stored: str) -> None:
    config = replace(toy("pi0", FlowSDEConfig(steps=3)), prefix_precision=stored)
    predicted = training_memory(config, frozen)
    policy = build_policy(config, EXAMPLE_ROBOT)
    set_frozen(policy, frozen)
    optimizer = torch.optim.AdamW(trained_parameters(policy))
    context = policy.restore(policy.store(encode(policy, observations(2))))
    policy.log_prob(context, policy.sample(context, torch.Generator()).trace).mean().backward()
    optimizer.step()
    trained = [parameter for parameter in trained_parameters(policy) if parameter.grad is not None]
    kept = [(one.grad, optimizer.state[one]["exp_avg"], optimizer.state[one]["exp_avg_sq"]) for one in trained]
    state = sum(tensor.nbytes for tensors in kept for tensor in tensors if tensor is not None)
    assert len(trained) == len(trained_parameters(policy))
    assert predicted["gradients and AdamW"] == pytest.approx(state / 1e9, rel=1e-9)
    assert predicted["weights"] == pytest.approx(sum(one.nbytes for one in policy.parameters()) / 1e9, rel=1e-9)


@pytest.mark.parametrize("name", sorted({config.name for config in CONFIGS.values()}))
def test_every_policy_is_predicted(name: str) -> None:
    """By its registered name; those that deep-copy modules while they are built too."""
    assert_predicted(CONFIGS[name])


@pytest.mark.parametrize("name", ["denoising", "pi0", "smolvla"])
def test_a_policy_with_a_noise_head_is_predicted(name: str) -> None:
    assert_predicted(replace(CONFIGS[name], explore=FlowNoiseConfig()))


def assert_predicted(config: Any) -> None:
    rows = policy_memory(config)
    assert rows[0]["value"] == sum(one.numel() for one in build_policy(config, EXAMPLE_ROBOT).parameters())
    assert all(row["value"] > 0 for row in rows)
