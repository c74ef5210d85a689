"""``vla-rl bench memory``: what policies of different sizes need on a device, computed from meta tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from episodes.sampler import Targets
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.policy import Policy, set_frozen, trained_parameters
from policies.registry import DEFAULT_POLICY, build_policy
from vla_rl.bench.options import EXAMPLE_ROBOT, BenchOptions
from vla_rl.bench.policy import observations, policy_config
from vla_rl.bench.record import Row, row

BYTES = {"weights": 4, "gradients": 4, "AdamW": 8}  # per trained parameter; all of them are float32
MICRO_BATCH = 64
ENVIRONMENTS, CHUNKS = 1024, 16  # of a rollout


def sized_policy(width: int, depth: int) -> Any:
    return replace(
        DEFAULT_POLICY(),
        encoder=CompactEncoderConfig(width=width),
        expert=ActionExpertConfig(depth=depth, heads=max(4, width // 128), action_patch=1),
    )


# About 1 M, 100 M and 3 B parameters, nearly all of them in the action expert.
SIZES: Mapping[str, Any] = {
    "1 M": DEFAULT_POLICY(),
    "100 M": sized_policy(1024, 8),
    "3 B": sized_policy(4096, 15),
}


def bench_memory(options: BenchOptions) -> list[Row]:
    """Parameters and GB: training state, activations of a micro-batch of behavior cloning, a rollout's observations.

    Of three sizes of the built-in policy, or of the named policy's default configuration.
    """
    if options.policy is not None:
        return policy_memory(policy_config(options.policy))
    rows = []
    for name, config in SIZES.items():
        with torch.device("meta"):
            policy = build_policy(config, EXAMPLE_ROBOT)
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        activations = activation_bytes(policy, MICRO_BATCH)
        rows.append(row(f"{name}, parameters", parameters, "1"))
        rows += [row(f"{name}, {part}", count * parameters / 1e9, "GB") for part, count in BYTES.items()]
        rows.append(row(f"{name}, activations of {MICRO_BATCH} observations", activations / 1e9, "GB"))
        total = sum(BYTES.values()) * parameters + activations
        rows.append(row(f"{name}, training in all", total / 1e9, "GB"))
    kept = sum(tensor.nbytes for tensor in observations(1).tensors()) * ENVIRONMENTS * CHUNKS
    return [*rows, row(f"observations of {ENVIRONMENTS} environments, {CHUNKS} chunks", kept / 1e9, "GB")]


def policy_memory(config: Any) -> list[Row]:
    """Of training all of a policy, and of training it with a frozen encoder, without a device."""
    policy = _on_meta(config)
    rows = [row("parameters", sum(parameter.numel() for parameter in policy.parameters()), "1")]
    rows.append(row("weights", _weight_bytes(policy) / 1e9, "GB"))
    for frozen in ((), ("encoder",)) if "encoder" in policy.parameter_groups() else ((),):
        set_frozen(policy, frozen)
        name = "encoder frozen" if frozen else "all trained"
        rows.append(row(f"{name}: trained parameters", sum(one.numel() for one in trained_parameters(policy)), "1"))
        rows += [row(f"{name}: {part}", value, "GB") for part, value in training_memory(policy).items()]
        rows.append(row(f"{name}: kept of one observation", _kept_bytes(policy) / 1e9, "GB"))
    if hasattr(config, "prefix_precision"):
        halved = frozen_prefix_memory(replace(config, prefix_precision="bfloat16"))
        rows += [row(f"encoder frozen, in bfloat16: {part}", value, "GB") for part, value in halved.items()]
    return rows


def frozen_prefix_memory(config: Any) -> dict[str, float]:
    """[GB] Of training the expert of a policy beside its frozen prefix."""
    policy = _on_meta(config)
    set_frozen(policy, ("encoder",))
    return training_memory(policy)


def training_memory(policy: Policy) -> dict[str, float]:
    """[GB] Of training what is not frozen, one observation at a time; ``policy`` is on the meta device."""
    state = sum(3 * parameter.nbytes for parameter in trained_parameters(policy))  # gradient and AdamW's two averages
    parts = {
        "weights": _weight_bytes(policy),
        "gradients and AdamW": state,
        "activations of one observation": activation_bytes(policy, 1),
    }
    found = {name: size / 1e9 for name, size in parts.items()}
    return found | {"training in all, one observation at a time": sum(found.values())}


def _on_meta(config: Any) -> Policy:
    with torch.device("meta"):
        return build_policy(config, EXAMPLE_ROBOT)


def _weight_bytes(policy: Policy) -> int:
    return sum(parameter.nbytes for parameter in policy.parameters())


def _kept_bytes(policy: Policy) -> int:
    """What a rollout keeps of one observation beside its trace."""
    context, _ = policy.encode(observations(1).to("meta"), policy.initial_state(1))
    return sum(tensor.nbytes for tensor in policy.store(context).tensors())


def activation_bytes(policy: Policy, batch: int) -> int:
    """Bytes that autograd keeps for the backward pass of ``bc_loss``; ``policy`` is on the meta device.

    Parameters are not counted, and what shares storage is counted once. Float32: in bfloat16 it is about half.
    """
    own = {parameter.untyped_storage()._cdata for parameter in policy.parameters()}
    kept: dict[int, Tensor] = {}  # the tensors too: a freed storage's address is used again

    def keep(tensor: Tensor) -> Tensor:
        if (address := tensor.untyped_storage()._cdata) not in own:
            kept[address] = tensor
        return tensor

    obs = observations(batch).to("meta")
    spec = policy.spec
    targets = Targets(
        action=obs.state.new_zeros(batch, spec.action_horizon, spec.robot.action_dim),
        mask=obs.state.new_ones(batch, spec.action_horizon),
        future=obs.state.new_zeros(batch, len(spec.future_steps) + 1, spec.robot.state_dim),
    )
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        context, _ = policy.encode(obs, policy.initial_state(batch))
        policy.bc_loss(context, targets, torch.Generator())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())
