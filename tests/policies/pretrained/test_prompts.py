"""The padding of prompts: not computed, and without effect on actions, features and kept records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from policies.policy import Policy
from policies.pretrained.tokenizer import pad_tokens
from policies.registry import build_policy
from sims.vector_env import Observation, encode_instructions
from tests.policies.encoding import encode
from tests.policies.pretrained.toy import FLOW_POLICIES, OPENVLA, OPENVLA_OFT
from tests.policies.test_every_policy import ROBOT, observe

CONFIGS: dict[str, Any] = {**FLOW_POLICIES, "openvla": OPENVLA, "openvla_oft": OPENVLA_OFT}
CONFIGS = {name: replace(config, prompt_tokens=96) for name, config in CONFIGS.items()}


def asked(*instructions: str) -> Observation:
    return replace(observe(len(instructions)), instruction=encode_instructions(instructions))


@pytest.fixture(params=CONFIGS)
def policy(request: pytest.FixtureRequest) -> Policy:
    torch.manual_seed(0)
    policy = build_policy(CONFIGS[request.param], ROBOT)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return policy.eval().requires_grad_(False)


@pytest.mark.parametrize(("longest", "padded"), [(0, 16), (1, 16), (16, 16), (17, 32), (40, 40), (90, 40)])
def test_prompts_are_padded_to_a_few_lengths(longest: int, padded: int) -> None:
    tokens, valid = pad_tokens([[7] * longest, [8]], 40, torch.device("cpu"))
    assert tokens.shape == valid.shape == (2, padded)
    assert valid.sum(1).tolist() == [min(longest, 40), 1]


def test_the_padding_is_not_computed(policy: Policy) -> None:
    lengths: list[int] = []
    network: Any = policy.network
    network.language.register_forward_pre_hook(lambda _, given: lengths.append(given[0].shape[1]))
    encode(policy, asked("go"))
    encode(policy, asked("go " * 30))
    assert lengths[1] - lengths[0] >= 32


def test_a_longer_prompt_beside_it_changes_no_action(policy: Policy) -> None:
    alone, beside = asked("go"), asked("go", "go " * 30)
    beside = replace(beside, images=alone.images.expand(2, -1, -1, -1, -1), state=alone.state.expand(2, -1))

    def deployed(obs: Observation) -> tuple[Tensor, Tensor]:
        context = encode(policy, obs)
        noise = torch.zeros(len(obs), *policy.spec.noise_shape)
        return policy.act_from_noise(context, noise)[:1], policy.value_features(context)[:1]

    for one, other in zip(deployed(alone), deployed(beside), strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def test_records_of_prompts_of_any_length_stack(policy: Policy) -> None:
    records = [policy.store(encode(policy, asked(text))) for text in ("go", "go " * 30)]
    assert len(type(records[0]).cat(records)) == 2
