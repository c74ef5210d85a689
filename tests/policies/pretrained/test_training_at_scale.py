"""What makes three billion parameters affordable: kept prefixes, adapted layers, half precision, recomputed layers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from policies.audit import LogProbMismatch
from policies.denoising.kernels import FlowSDEConfig
from policies.policy import Policy, set_frozen, trained_parameters
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.flow_policy import cache_bytes
from policies.pretrained.lora import LoRAConfig
from policies.pretrained.smolvla.network import CrossAttention
from policies.pretrained.storage import StorageConfig
from policies.pretrained.vision import VisionConfig
from policies.registry import build_policy
from sims.errors import UserError
from sims.vector_env import Observation
from tests.policies.encoding import encode
from tests.policies.pretrained.toy import FLOW_POLICIES, OPENVLA, OPENVLA_OFT, toy
from tests.policies.test_every_policy import ROBOT, generator, observe
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.algorithms.update_settings import UpdateConfig
from vla_rl.rollouts.experience import Experience

NAMES = list(FLOW_POLICIES)
CONFIGS = {name: toy(name, FlowSDEConfig(steps=3)) for name in NAMES} | {"openvla": OPENVLA, "openvla_oft": OPENVLA_OFT}


def made(name: str, **changes: Any) -> Policy:
    torch.manual_seed(0)
    return build_policy(replace(CONFIGS[name], **changes), ROBOT)


def test_records_go_where_they_fit() -> None:
    storage = StorageConfig(device_gb=8, host_gb=32)
    megabytes = 10_300_000  # pi0, two cameras
    assert [storage.place(megabytes, records) for records in (700, 3_000, 24_576)] == ["device", "host", "recompute"]
    assert StorageConfig(where="host").place(megabytes, 1) == "host"


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("where", ["device", "host", "recompute"])
def test_log_probs_are_the_same_wherever_the_prefix_was_kept(name: str, where: Any) -> None:
    policy = made(name, storage=StorageConfig(where=where))
    set_frozen(policy, ("encoder",))
    policy.plan_storage(100)
    context = encode(policy, observe(4))
    sample = policy.sample(context, generator())
    record = policy.store(context)
    assert isinstance(record, Observation) == (where == "recompute")
    log_prob = policy.log_prob(policy.restore(record), sample.trace)
    assert (log_prob - sample.log_prob).abs().max() <= 1e-5


def test_what_smolvlas_expert_makes_of_a_bfloat16_prefix_is_float32() -> None:
    policy, seen = made("smolvla", prefix_precision="bfloat16"), list[torch.dtype]()
    for module in policy.modules():
        if isinstance(module, CrossAttention):
            module.k_proj.register_forward_hook(lambda _, inputs, output: seen.append(output.dtype))
    context = encode(policy, observe(3))
    assert context.cache.keys_values.dtype == torch.bfloat16
    policy.sample(context, generator())
    assert set(seen) == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_a_prefix_in_half_precision_is_not_trained_but_by_lora(name: str) -> None:
    """Of its elements AdamW at the recipes' learning rate changed one in a hundred."""
    policy = made(name, prefix_precision="bfloat16")
    with pytest.raises(UserError, match=r"encoder is stored in bfloat16.*freeze \[encoder\]"):
        set_frozen(policy, ())
    set_frozen(policy, ("encoder",))
    adapted = made(name, prefix_precision="bfloat16", lora=LoRAConfig(rank=2))
    set_frozen(adapted, ("encoder",))
    assert {parameter.dtype for parameter in trained_parameters(adapted)} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_the_size_of_a_record_is_predicted(name: str) -> None:
    policy = made(name)
    cache = encode(policy, observe(3)).cache
    assert cache.keys_values.nbytes == 3 * cache_bytes(policy.config, cameras=1, precision="float32")


def test_the_size_of_pi0s_record() -> None:
    """10.3 MB with two cameras, 15.0 with three, in bfloat16."""
    from policies.pretrained.pi0.config import Pi0Config

    sizes = [cache_bytes(Pi0Config(), cameras=cameras, precision="bfloat16") / 1e6 for cameras in (2, 3)]
    assert [round(size, 1) for size in sizes] == [10.3, 15.0]


@pytest.mark.parametrize("name", NAMES)
def test_adapted_layers_start_as_they_were_and_alone_are_trained(name: str) -> None:
    plain, adapted = made(name), made(name, lora=LoRAConfig(rank=2))
    missing = adapted.load_state_dict(plain.state_dict(), strict=False)
    assert not missing.unexpected_keys and all("lora_" in key for key in missing.missing_keys)
    one, two = (encode(policy, observe(3)).cache.keys_values for policy in (plain, adapted))
    torch.testing.assert_close(one, two)
    set_frozen(adapted, ("encoder", "expert"))
    with torch.no_grad():
        for parameter in adapted.parameter_groups()["lora"]:
            parameter += 0.1
    context = adapted.restore(adapted.store(encode(adapted, observe(3))))
    adapted.log_prob(context, adapted.sample(context, generator()).trace).mean().backward()
    groups = adapted.parameter_groups()
    assert all(parameter.grad is not None for parameter in groups["lora"])
    assert all(parameter.grad is None for parameter in (*groups["encoder"], *groups["expert"]))


@pytest.mark.parametrize("name", NAMES)
def test_recomputed_layers_give_the_same_gradients(name: str) -> None:
    gradients = []
    for checkpointing in (False, True):
        policy = made(name, checkpointing=checkpointing)
        context = policy.restore(policy.store(encode(policy, observe(2))))
        trace = made(name).sample(encode(made(name), observe(2)), generator()).trace
        policy.log_prob(context, trace).mean().backward()
        gradients.append([p.grad.clone() for group in policy.parameter_groups().values() for p in group])  # type: ignore[union-attr]
    for one, two in zip(*gradients, strict=True):
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stored", ["float32", "bfloat16"])
def test_half_precision_keeps_log_probs_within_a_tenth_nat_per_chunk(name: str, stored: Any) -> None:
    """The run's precision, with the prefix's weights stored in either."""
    policy = made(name, prefix_precision=stored)
    policy.precision = "bfloat16"
    assert difference_of_log_probs(policy) <= 0.1


@pytest.mark.parametrize("name", NAMES)
def test_with_the_prefix_in_half_precision_log_probs_are_as_exact_as_in_float32(name: str) -> None:
    assert difference_of_log_probs(made(name, prefix_precision="bfloat16")) <= 1e-4


@pytest.mark.parametrize("where", ["host", "recompute"])
def test_the_audit_allows_for_a_half_precision_prefix_only_where_it_is_encoded_again(where: Any) -> None:
    """pi0 of a width at which the shape of a batch shows, in micro-batches of 8 of a rollout of 32."""
    wide: dict[str, Any] = {"mlp_width": 1024, "depth": 6, "heads": 4, "kv_heads": 1, "head_dim": 64}
    vision = VisionConfig(width=256, mlp_width=512, depth=4, heads=4, image_size=56)
    policy = made(
        "pi0",
        prefix_precision="bfloat16",
        storage=StorageConfig(where=where),
        language=DecoderConfig(width=512, **wide),
        expert=DecoderConfig(width=256, **wide),
        vision=vision,
    )
    update = ClippedUpdate(UpdateConfig(frozen=("encoder",)), policy, seed=0)
    context = encode(policy, observe(32))
    sample = policy.sample(context, generator())
    numbers, flags = torch.zeros(32), torch.ones(32, dtype=torch.bool)
    batch = Experience(
        inputs=policy.store(context), trace=sample.trace, log_prob=sample.log_prob, value=numbers, next_value=numbers,
        reward=numbers, num_executed=numbers.long() + 8, terminated=flags, truncated=flags, success=flags, valid=flags,
        task=numbers.long(), policy_version=numbers.long(), actor=numbers.long(),
    )[torch.arange(8)]  # fmt: skip
    largest = max(step.max for step in update.audit(batch))
    if where == "recompute":
        assert largest <= 0.1
        return
    assert largest <= 1e-4
    with pytest.raises(LogProbMismatch, match=r"tolerance 0\.001"):
        update.audit(replace(batch, log_prob=batch.log_prob + 0.01))


def difference_of_log_probs(policy: FlowVLA) -> float:
    """Largest, per chunk, between rollout and updates in batches of other shapes, on kept keys and values."""
    set_frozen(policy, ("encoder",))
    context = encode(policy, observe(4))
    assert context.cache.keys_values.dtype == torch.bfloat16
    sample = policy.sample(context, generator())
    record, differences = policy.store(context), []
    for index in (torch.tensor([2]), torch.tensor([3, 0, 1])):
        log_prob = policy.log_prob(policy.restore(record[index]), sample.trace[index])
        assert log_prob.dtype == torch.float32
        differences.append((log_prob - sample.log_prob[index]).sum((1, 2, 3)).abs().max().item())
    return max(differences)
