"""pi0 and pi0.5 against LeRobot (golden files) and transformers (live), masks, cache, layout, parameter counts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from policies.denoising.denoise import integrate
from policies.denoising.kernels import FlowODE, FlowODEConfig
from policies.pretrained.checkpoint import CheckpointError, load_tensors
from policies.pretrained.flow_network import suffix_mask
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.pi0.layout import PI0
from policies.pretrained.pi0.network import Pi0Network, suffix_block
from policies.pretrained.pi0.policy import Pi0, state_bins
from tests.policies.pretrained.golden import Golden, read_golden
from tests.policies.pretrained.tiny_pi0 import ROBOT, tiny_pi0
from tests.policies.pretrained.transformers_pi0 import transformers_pi0

TOLERANCE = 5e-5
VERSIONS: tuple[Any, ...] = ("pi0", "pi05")
CAMERAS = (1, 2, 3)


@pytest.fixture(params=VERSIONS)
def version(request: pytest.FixtureRequest) -> Any:
    return request.param


def network_of(version: Any, golden: Golden) -> Pi0Network:
    network = Pi0Network(tiny_pi0(version)).eval().requires_grad_(False)
    load_tensors(network, golden.weights, PI0, source=version)
    return network


def sampled(network: Pi0Network, inputs: dict[str, Tensor], *, steps: int) -> Tensor:
    cache = network.prefix(inputs["images"], inputs["tokens"], inputs["valid"])
    kernel = FlowODE(FlowODEConfig(steps=steps))
    return integrate(network.bind(cache, inputs["state"]), kernel, inputs["noise"])


def difference_to_lerobot(version: Any) -> float:
    """Two cameras (LeRobot has a third one masked, which is left out here), one prompt padded, ten steps."""
    golden = read_golden(version, norms_around=0.0)
    action = sampled(network_of(version, golden), golden.inputs, steps=10)
    return (action - golden.outputs["action"]).abs().max().item()


def difference_to_transformers(cameras: int) -> float:
    """Live, pi0 alone: transformers has no pi0.5. Four steps."""
    golden = read_golden("pi0", norms_around=0.0)
    network = network_of("pi0", golden)
    reference = transformers_pi0(tiny_pi0(), golden.weights)
    inputs = dict(golden.inputs)
    inputs["images"] = torch.cat([inputs["images"], inputs["images"].flip(-1)], dim=1)[:, :cameras]
    image_tokens = torch.full((2, cameras * 4), 511)
    expected = reference.sample_actions(
        inputs["state"],
        torch.cat([image_tokens, inputs["tokens"]], dim=1),
        inputs["images"],
        noise=inputs["noise"].clone(),
        attention_mask=torch.cat([torch.ones_like(image_tokens), inputs["valid"].long()], dim=1),
        pixel_attention_mask=torch.ones(2, cameras, dtype=torch.bool),
        num_steps=4,
    )
    return (sampled(network, inputs, steps=4) - expected).abs().max().item()


def test_the_same_weights_give_lerobots_actions(version: Any) -> None:
    assert difference_to_lerobot(version) <= TOLERANCE


@pytest.mark.parametrize("cameras", CAMERAS)
def test_the_same_weights_give_transformers_actions(cameras: int) -> None:
    pytest.importorskip("transformers")
    assert difference_to_transformers(cameras) <= TOLERANCE


def test_steps_that_share_a_context_equal_steps_taken_alone(version: Any) -> None:
    """The mask keeps the S steps of one call apart; the cache serves them all."""
    golden = read_golden(version, norms_around=0.0)
    network, inputs = network_of(version, golden), golden.inputs
    cache = network.prefix(inputs["images"], inputs["tokens"], inputs["valid"])
    x_t, t = torch.randn(2, 3, 10, 32), torch.tensor([[0.9, 0.5, 0.1]])
    velocity = network.bind(cache, inputs["state"])
    together = velocity(x_t, t).target
    for i in range(3):
        alone = velocity(x_t[:, i : i + 1], t[:, i : i + 1]).target
        torch.testing.assert_close(together[:, i : i + 1], alone, atol=2e-5, rtol=0)


def test_padding_of_the_prompt_changes_nothing(version: Any) -> None:
    golden = read_golden(version, norms_around=0.0)
    network, inputs = network_of(version, golden), golden.inputs
    longer = dict(inputs)
    longer["tokens"] = torch.cat([inputs["tokens"], torch.full((2, 5), 77)], dim=1)
    longer["valid"] = torch.cat([inputs["valid"], torch.zeros(2, 5, dtype=torch.bool)], dim=1)
    torch.testing.assert_close(sampled(network, inputs, steps=4), sampled(network, longer, steps=4), atol=2e-5, rtol=0)


def test_who_sees_whom() -> None:
    """Perturb each block: the prefix changes all, the state does not change the prefix, actions change actions."""
    golden = read_golden("pi0", norms_around=0.0)
    network, inputs = network_of("pi0", golden), golden.inputs
    hidden: dict[str, Tensor] = {}
    network.expert.norm.register_forward_hook(lambda module, args, output: hidden.update(suffix=output[0]))

    def suffix(images: Tensor, state: Tensor, x_t: Tensor) -> Tensor:
        cache = network.prefix(images, inputs["tokens"], inputs["valid"])
        network.bind(cache, state)(x_t.unsqueeze(1), torch.tensor([[0.5]]))
        return hidden["suffix"]  # [B, state and actions, width]

    images, state, x_t = inputs["images"], inputs["state"], inputs["noise"]
    before = suffix(images, state, x_t)

    def changed(after: Tensor) -> tuple[bool, bool]:
        difference = (after - before).abs().amax((0, 2))
        return bool(difference[0] > 1e-6), bool((difference[1:] > 1e-6).all())

    assert changed(suffix(images + 0.1, state, x_t)) == (True, True)
    assert changed(suffix(images, state + 0.1, x_t)) == (True, True)
    later = x_t.clone()
    later[:, -1] += 0.5
    assert changed(suffix(images, state, later)) == (False, True)


def test_the_suffix_mask_by_hand() -> None:
    block = suffix_block(state_tokens=1, actions=2, device=torch.device("cpu"))
    mask = suffix_mask(torch.tensor([[True, False]]), block, 2)[0, 0].int()
    assert mask.tolist() == [
        [1, 0, 1, 0, 0, 0, 0, 0],
        [1, 0, 1, 1, 1, 0, 0, 0],
        [1, 0, 1, 1, 1, 0, 0, 0],
        [1, 0, 0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 0, 1, 1, 1],
        [1, 0, 0, 0, 0, 1, 1, 1],
    ]


# -- checkpoints ------------------------------------------------------------------------------------------------------


def test_every_published_layout_loads_and_dead_weights_are_named() -> None:
    golden = read_golden("pi0", norms_around=0.0)
    embedding = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    head = "paligemma_with_expert.paligemma.lm_head.weight"
    weights = dict(golden.weights)
    weights[head] = weights[embedding]
    only_head = {name: value for name, value in weights.items() if name != embedding}
    lerobot = {f"model.{name}": value for name, value in only_head.items()}
    for tensors, tied in ((weights, [head]), (only_head, []), (lerobot, [])):
        network = Pi0Network(tiny_pi0())
        dead = load_tensors(network, tensors, PI0, source="file")
        assert [name for name in dead if "gemma_expert.lm_head" not in name] == tied
        assert torch.equal(network.embed_tokens.weight, weights[embedding])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: w.pop("action_in_proj.bias"), r"1 missing: action_in_proj\.bias"),
        (lambda w: w.update(extra=torch.zeros(1)), "1 unexpected: extra"),
        (lambda w: w.update({"action_in_proj.bias": torch.zeros(3)}), r"action_in_proj\.bias \[3\], expected \[64\]"),
        (lambda w: w.update({"model.state_proj.bias": w.pop("state_proj.bias")}), "a mixed file"),
        (
            lambda w: w.update({"paligemma_with_expert.paligemma.lm_head.weight": torch.zeros(512, 128)}),
            "given twice with different values",
        ),
    ],
)
def test_a_wrong_partial_or_mixed_checkpoint_stops(damage: Any, message: str) -> None:
    weights = dict(read_golden("pi0", norms_around=0.0).weights)
    damage(weights)
    network = Pi0Network(tiny_pi0())
    before = network.state_proj.weight.clone()
    with pytest.raises(CheckpointError, match=message):
        load_tensors(network, weights, PI0, source="file")
    assert torch.equal(network.state_proj.weight, before)  # nothing was copied


def test_a_checkpoint_of_the_other_version_stops() -> None:
    weights = read_golden("pi05", norms_around=0.0).weights
    with pytest.raises(CheckpointError, match=r"missing: .*action_time_mlp_in.*unexpected: .*input_layernorm\.dense"):
        load_tensors(Pi0Network(tiny_pi0("pi0")), weights, PI0, source="file")


@pytest.mark.parametrize(("version", "expected"), [("pi0", 3_238_048_528), ("pi05", 3_353_433_872)])
def test_published_sizes(version: Any, expected: int) -> None:
    """3.238 and 3.353 B: vision 412.4 M, projector 2.4, embedding 526.6, Gemma 1981.9, expert 311.5 or 427.9."""
    with torch.device("meta"):
        policy = Pi0(Pi0Config(version=version), ROBOT)
    assert sum(parameter.numel() for parameter in policy.parameters()) == expected


def test_state_bins_as_numpy_digitizes() -> None:
    import numpy as np

    state = torch.tensor([[-1.5, -1.0, -0.9999, 0.0, 0.37, 0.9999, 1.0, 2.0]])
    expected = np.digitize(state.numpy(), bins=np.linspace(-1, 1, 257)[:-1]) - 1
    assert state_bins(state).tolist() == expected.tolist()
