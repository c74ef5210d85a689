"""OpenVLA against timm and transformers (a golden file), its token bins, its heads, its layout, parameter counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from policies.policy import Policy, set_frozen, trained_parameters
from policies.pretrained.checkpoint import CheckpointError, load_tensors
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.lora import LoRAConfig
from policies.pretrained.openvla.config import OpenVLAConfig
from policies.pretrained.openvla.layout import layout_of
from policies.pretrained.openvla.network import OpenVLANetwork
from policies.pretrained.openvla.policy import bin_centers, bins_of
from policies.pretrained.vision import VisionConfig
from policies.registry import build_policy
from sims.errors import UserError
from tests.policies.encoding import encode
from tests.policies.pretrained.golden import read_golden
from tests.policies.pretrained.log_probs import FROZEN, log_prob_difference
from tests.policies.pretrained.tiny_pi0 import ROBOT
from tests.policies.pretrained.toy import OPENVLA, OPENVLA_OFT
from tests.policies.test_every_policy import ROBOT as SMALL_ROBOT
from tests.policies.test_every_policy import generator, observe

TINY = OpenVLAConfig(
    vocabulary=512,
    action_vocabulary=468,
    dino=VisionConfig(width=32, mlp_width=128, depth=3, heads=2, image_size=28),
    siglip=VisionConfig(width=32, mlp_width=119, depth=3, heads=2, image_size=28),
    language=DecoderConfig(width=64, mlp_width=128, depth=2, heads=4, kv_heads=4, head_dim=16, family="llama"),
)
GOLDEN = read_golden("openvla", norms_around=1.0)


def network_of(config: OpenVLAConfig) -> OpenVLANetwork:
    network = OpenVLANetwork(config, action_dim=7, state_dim=8).eval().requires_grad_(False)
    dead = load_tensors(network, GOLDEN.weights, layout_of(config), source="file")
    assert any("attn_pool" in name for name in dead) and any("blocks.3." in name for name in dead)
    return network


def embedded_of(network: OpenVLANetwork) -> tuple[torch.Tensor, torch.Tensor]:
    valid = GOLDEN.inputs["valid"]
    embedded = network.embed(GOLDEN.inputs["images"], GOLDEN.inputs["tokens"], torch.zeros(2, 8))
    return embedded, torch.cat([valid[:, :1], torch.ones(2, 4, dtype=torch.bool), valid[:, 1:]], dim=1)


def difference_one_by_one() -> float:
    """Of given tokens, with the prefix encoded once; one prompt is padded, the reference's is not."""
    network = network_of(TINY)
    cache, first = network.prefill(*embedded_of(network))
    logits = network.action_logits(network.decode(cache, first, GOLDEN.inputs["action"][:, :-1]))
    return (logits - GOLDEN.outputs["causal"][..., 468 - 256 : 468].flip(-1)).abs().max().item()


def difference_in_parallel() -> float:
    network = network_of(replace(TINY, decoding="parallel", action_horizon=2))
    logits = network.action_logits(network.decode_parallel(*embedded_of(network)))
    return (logits - GOLDEN.outputs["parallel"][..., 468 - 256 : 468].flip(-1)).abs().max().item()


def test_one_by_one_decoding_has_the_references_logits() -> None:
    assert difference_one_by_one() <= 5e-5


def test_parallel_decoding_has_the_references_logits() -> None:
    assert difference_in_parallel() <= 5e-5


def exploring(config: OpenVLAConfig) -> Policy:
    torch.manual_seed(0)
    return build_policy(config, SMALL_ROBOT)


def test_all_256_bins() -> None:
    """OpenVLA's tokenizer: id = 32000 - digitize(x), value = center[clip(31999 - id, 0, 254)]."""
    edges = np.linspace(-1, 1, 256)
    centers = (edges[:-1] + edges[1:]) / 2
    identifiers = np.arange(31_744, 32_000)
    bins = torch.from_numpy(31_999 - identifiers)
    expected = centers[np.clip(31_999 - identifiers, 0, 254)]
    np.testing.assert_allclose(bin_centers(torch.device("cpu"))[bins].numpy(), expected, atol=1e-7)
    x = np.concatenate([np.linspace(-1.2, 1.2, 10_001), edges, centers])
    encoded = 32_000 - np.digitize(np.clip(x, -1, 1), edges)
    assert (31_999 - bins_of(torch.from_numpy(x)).numpy()).tolist() == encoded.tolist()


@pytest.mark.parametrize("config", [OPENVLA, OPENVLA_OFT], ids=["autoregressive", "parallel"])
def test_adapted_layers_start_as_they_were_and_alone_are_trained(config: OpenVLAConfig) -> None:
    torch.manual_seed(0)
    plain, adapted = (build_policy(one, SMALL_ROBOT) for one in (config, replace(config, lora=LoRAConfig(rank=2))))
    missing = adapted.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and all("lora_" in key for key in missing.missing_keys)
    torch.testing.assert_close(encode(plain, observe(3)).hidden, encode(adapted, observe(3)).hidden)
    set_frozen(adapted, ("encoder", "head"))
    with torch.no_grad():
        for parameter in adapted.parameter_groups()["lora"]:
            parameter.add_(0.1)
    context = encode(adapted, observe(3))
    sample = adapted.sample(context, generator())
    log_prob = adapted.log_prob(adapted.restore(adapted.store(context)), sample.trace)
    assert (log_prob - sample.log_prob).abs().max() <= 1e-5
    log_prob.mean().backward()
    groups = adapted.parameter_groups()
    assert all(parameter.grad is not None for parameter in groups["lora"])
    assert all(parameter.grad is None for parameter in (*groups["encoder"], *groups["head"]))


@pytest.mark.parametrize("config", [OPENVLA, OPENVLA_OFT], ids=["autoregressive", "parallel"])
@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN)
def test_log_probs_are_those_of_the_rollout(config: OpenVLAConfig, frozen: tuple[str, ...]) -> None:
    policy = exploring(config)
    assert log_prob_difference(policy, frozen) <= 1e-5
    context = encode(policy, observe(5))
    assert policy.act(context, generator()).shape == policy.sample(context, generator()).action.shape


@pytest.mark.parametrize("config", [OPENVLA, OPENVLA_OFT], ids=["autoregressive", "parallel"])
@pytest.mark.parametrize("frozen", [("encoder", "lora"), ("encoder", "head")], ids=["head", "lora"])
def test_half_precision_keeps_log_probs_within_a_tenth_nat_per_chunk(
    config: OpenVLAConfig, frozen: tuple[str, ...]
) -> None:
    """The matrices are stored in bfloat16, but for the head and what adapts them."""
    torch.manual_seed(0)
    halved = replace(config, prefix_precision="bfloat16", checkpointing=True, lora=LoRAConfig(rank=2))
    policy: Any = build_policy(halved, SMALL_ROBOT)
    set_frozen(policy, frozen)
    assert all(one.dtype == torch.float32 for one in (policy.network.lm_head.weight, *trained_parameters(policy)))
    assert policy.network.language.layers[0].mlp.up_proj.weight.dtype == torch.bfloat16
    context = encode(policy, observe(4))
    assert context.hidden.dtype == torch.bfloat16
    sample = policy.sample(context, generator())
    log_prob = policy.log_prob(policy.restore(policy.store(context)), sample.trace)
    assert log_prob.dtype == torch.float32
    assert (log_prob - sample.log_prob).sum((1, 2, 3)).abs().max() <= 0.1
    log_prob.mean().backward()
    assert all(one.grad is not None for one in trained_parameters(policy))


def test_decoding_one_by_one_is_greedy_under_its_own_likelihood() -> None:
    policy: Any = build_policy(OPENVLA, SMALL_ROBOT)
    context = encode(policy, observe(3))
    bins = policy._decode(context, lambda logits: logits.argmax(-1))
    assert torch.equal(policy._logits(context, bins).argmax(-1), bins)


def test_an_l1_head_clones_and_acts_and_says_that_it_has_no_density() -> None:
    policy = build_policy(replace(OPENVLA_OFT, head="l1", proprio=True), SMALL_ROBOT)
    context = encode(policy, observe(3))
    assert policy.act(context, generator()).shape == (3, 8, 3)
    with pytest.raises(UserError, match="no density"):
        policy.sample(context, generator())


def test_a_checkpoint_without_its_vision_stops() -> None:
    weights = {name: value for name, value in GOLDEN.weights.items() if "fused_featurizer.blocks.0" not in name}
    network = OpenVLANetwork(TINY, action_dim=7, state_dim=8)
    with pytest.raises(CheckpointError, match=r"12 missing: vision_backbone\.fused_featurizer\.blocks\.0"):
        load_tensors(network, weights, layout_of(TINY), source="file")


def test_published_size() -> None:
    """7.5 B: Llama 6738.9 M with 64 more tokens, the vision models without their last blocks, the projector 71.4 M."""
    with torch.device("meta"):
        network: Any = build_policy(OpenVLAConfig(), ROBOT).network
    parts = [network.language, network.embed_tokens, network.lm_head]
    llama = sum(parameter.numel() for part in parts for parameter in part.parameters())
    assert llama == 6_738_415_616 + 2 * 64 * 4096
    assert sum(parameter.numel() for parameter in network.projector.parameters()) == 71_385_600


@pytest.mark.parametrize("config", [OPENVLA, replace(OPENVLA, proprio=True), OPENVLA_OFT])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_the_size_of_a_record_is_predicted(config: OpenVLAConfig, precision: Any) -> None:
    policy: Any = build_policy(config, SMALL_ROBOT)
    policy.precision = precision
    context = encode(policy, observe(3))
    made = context.hidden.nbytes + (0 if context.cache is None else context.cache.keys_values.nbytes)
    assert made == 3 * policy.record_bytes


def test_oft_clips_the_state_it_sees() -> None:
    """To the range of its quantiles: openvla-oft, normalize_proprio."""
    policy: Any = build_policy(replace(OPENVLA_OFT, proprio=True), SMALL_ROBOT).eval()
    policy.normalizer.set_scale("state", torch.full((5,), 0.1), torch.full((5,), 0.2))

    def seen(state: float) -> torch.Tensor:
        return encode(policy, replace(observe(2), state=torch.full((2, 5), state))).hidden

    with torch.no_grad():
        assert torch.equal(seen(0.5), seen(0.3)) and torch.equal(seen(-0.2), seen(-0.1))
        assert not torch.equal(seen(0.3), seen(0.2))
