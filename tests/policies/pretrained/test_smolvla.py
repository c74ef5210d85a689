"""SmolVLA against LeRobot (a golden file); who sees whom; what the state trains; parameter counts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from policies.denoising.denoise import integrate
from policies.denoising.kernels import FlowODE, FlowODEConfig
from policies.pretrained.checkpoint import CheckpointError, load_tensors
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.smolvla.config import SmolVLAConfig
from policies.pretrained.smolvla.network import SmolVLANetwork, pixel_shuffle
from policies.pretrained.smolvla.policy import LEROBOT, SmolVLAPolicy
from policies.pretrained.vision import VisionConfig
from tests.policies.pretrained.golden import read_golden
from tests.policies.pretrained.tiny_pi0 import ROBOT

HEADS = {"depth": 4, "heads": 6, "kv_heads": 2, "head_dim": 16}
TINY = SmolVLAConfig(
    chunk_size=10,
    vocabulary=512,
    shuffle=2,
    vision=VisionConfig(width=32, mlp_width=64, depth=2, heads=2, image_size=64, patch_size=16),
    language=DecoderConfig(width=96, mlp_width=128, family="llama", norm_eps=1e-5, **HEADS),
    expert=DecoderConfig(width=72, mlp_width=256, family="llama", norm_eps=1e-5, **HEADS),
)


@pytest.fixture(scope="module")
def network() -> SmolVLANetwork:
    return loaded()


def loaded() -> SmolVLANetwork:
    made = SmolVLANetwork(TINY).eval().requires_grad_(False)
    dead = load_tensors(made, read_golden("smolvla", norms_around=1.0).weights, LEROBOT, source="file")
    assert dead == ["vlm_with_expert.vlm.lm_head.weight"]
    return made


INPUTS = read_golden("smolvla", norms_around=1.0).inputs


def sampled(network: SmolVLANetwork, inputs: dict[str, Tensor]) -> Tensor:
    cache = network.prefix(inputs["images"], inputs["tokens"], inputs["valid"])
    return integrate(network.bind(cache, inputs["state"]), FlowODE(FlowODEConfig(steps=10)), inputs["noise"])


def difference_to_lerobot(network: SmolVLANetwork) -> float:
    """Two cameras, one prompt padded, ten steps."""
    expected = read_golden("smolvla", norms_around=1.0).outputs["action"]
    return (sampled(network, INPUTS) - expected).abs().max().item()


def test_the_same_weights_give_lerobots_actions(network: SmolVLANetwork) -> None:
    assert difference_to_lerobot(network) <= 5e-5


def test_padding_of_the_prompt_changes_nothing(network: SmolVLANetwork) -> None:
    longer = dict(INPUTS)
    longer["tokens"] = torch.cat([INPUTS["tokens"], torch.full((2, 5), 77)], dim=1)
    longer["valid"] = torch.cat([INPUTS["valid"], torch.zeros(2, 5, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(sampled(network, INPUTS), sampled(network, longer), atol=2e-5, rtol=0)


def test_steps_that_share_a_context_equal_steps_taken_alone(network: SmolVLANetwork) -> None:
    velocity = network.bind(network.prefix(INPUTS["images"], INPUTS["tokens"], INPUTS["valid"]), INPUTS["state"])
    x_t, t = torch.randn(2, 3, 10, 32), torch.tensor([[0.9, 0.5, 0.1]])
    together = velocity(x_t, t).target
    for i in range(3):
        alone = velocity(x_t[:, i : i + 1], t[:, i : i + 1]).target
        torch.testing.assert_close(together[:, i : i + 1], alone, atol=2e-5, rtol=0)


def test_actions_see_earlier_actions_the_state_and_the_prefix(network: SmolVLANetwork) -> None:
    def velocity(images: Tensor, state: Tensor, x_t: Tensor) -> Tensor:
        cache = network.prefix(images, INPUTS["tokens"], INPUTS["valid"])
        return network.bind(cache, state)(x_t.unsqueeze(1), torch.tensor([[0.5]])).target[:, 0]

    images, state, x_t = INPUTS["images"], INPUTS["state"], INPUTS["noise"]
    before = velocity(images, state, x_t)
    changed_action = x_t.clone()
    changed_action[:, 4] += 0.5
    for after, seen_from in (
        (velocity(images + 0.1, state, x_t), 0),
        (velocity(images, state + 0.1, x_t), 0),
        (velocity(images, state, changed_action), 4),
    ):
        difference = (after - before).abs().amax((0, 2))
        assert (difference[seen_from:] > 1e-6).all() and (difference[:seen_from] == 0).all()


def test_a_trained_state_projection_gets_its_gradient_through_the_frozen_model() -> None:
    made = SmolVLANetwork(TINY)
    for module in (made.vision, made.connector, made.embed_tokens, made.language):
        module.requires_grad_(False)
    cache = made.prefix(INPUTS["images"], INPUTS["tokens"], INPUTS["valid"])
    assert not cache.keys_values.requires_grad
    made.bind(cache, INPUTS["state"])(INPUTS["noise"].unsqueeze(1), torch.tensor([[0.5]])).target.sum().backward()
    assert made.state_proj.weight.grad is not None and made.state_proj.weight.grad.abs().sum() > 0


def test_pixel_shuffle_by_hand() -> None:
    """Four by four patches to two by two tokens."""
    x = torch.arange(16.0).view(1, 16, 1)
    assert pixel_shuffle(x, 2)[0].tolist() == [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]


def test_a_partial_checkpoint_stops() -> None:
    weights = dict(read_golden("smolvla", norms_around=1.0).weights)
    del weights["state_proj.bias"]
    with pytest.raises(CheckpointError, match=r"1 missing: state_proj\.bias"):
        load_tensors(SmolVLANetwork(TINY), weights, LEROBOT, source="file")


def test_published_size() -> None:
    """450.0 M with the dead output layer of the language model, of which the expert and projections are 99.9 M."""
    with torch.device("meta"):
        policy = SmolVLAPolicy(SmolVLAConfig(), ROBOT)
    dead = policy.config.vocabulary * policy.config.language.width
    total = sum(parameter.numel() for parameter in policy.parameters()) + dead
    expert = sum(parameter.numel() for parameter in policy.parameter_groups()["expert"])
    assert (round(total / 1e6, 1), round(expert / 1e6, 1)) == (450.0, 99.9)
