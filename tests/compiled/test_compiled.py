"""What torch.compile makes of networks; without ``--check-types``, since checks of annotations cannot be compiled."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

from policies.denoising.kernels import FlowSDEConfig
from policies.registry import build_policy
from tests.policies.encoding import encode
from tests.policies.pretrained.toy import FLOW_POLICIES, OPENVLA_OFT, toy
from tests.policies.test_every_policy import ROBOT, generator, observe
from world_models.models.causal_transformer import CausalTransformer


@pytest.mark.parametrize("name", [*FLOW_POLICIES, "openvla_oft"])
@torch.no_grad()
def test_a_compiled_policy_acts_alike(name: str) -> None:
    counters.clear()
    torch.manual_seed(0)
    policy = build_policy(OPENVLA_OFT if name == "openvla_oft" else toy(name, FlowSDEConfig(steps=3)), ROBOT)
    action = policy.act(encode(policy, observe(2)), generator())
    policy.compile(backend="eager")
    torch.testing.assert_close(policy.act(encode(policy, observe(2)), generator()), action, atol=1e-5, rtol=1e-4)
    assert counters["stats"]["calls_captured"] > 0


def test_the_transformer_of_a_world_model_compiles_to_one_graph() -> None:
    """Without graph breaks, both ways it is called; code generation is not tested."""
    torch.manual_seed(0)
    transformer = CausalTransformer(width=32, depth=2, heads=2, grid=(2, 2, 2))
    compiled = torch.compile(transformer, backend="eager", fullgraph=True)
    tokens, condition = torch.randn(2, 4, 8, 32), torch.randn(2, 4, 32)
    with torch.no_grad():
        whole, _ = transformer(tokens, condition)
        _, past = compiled(tokens[:, :3], condition[:, :3])
        last, _ = compiled(tokens[:, 3:], condition[:, 3:], past)
    torch.testing.assert_close(last, whole[:, 3:], rtol=1e-4, atol=1e-5)
