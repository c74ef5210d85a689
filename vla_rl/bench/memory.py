"""``vla-rl bench memory``: what policies of different sizes need on a device, found without one.

An update runs on fake tensors, which have shapes and no numbers; the peak is what their storages have at once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.policy import Policy, half_precision_groups, set_frozen, trained_parameters
from policies.registry import DEFAULT_POLICY, build_policy
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.policy import observations, policy_config, update
from vla_rl.bench.record import Row, row

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


def bench_memory(policy: str | None = None) -> list[Row]:
    """Parameters, and GB that an update of a micro-batch and a rollout's observations take.

    Of three sizes of the built-in policy, or of the named policy's default configuration.
    """
    if policy is not None:
        return policy_memory(policy_config(policy))
    rows = []
    for name, config in SIZES.items():
        rows.append(row(f"{name}, parameters", sum(one.numel() for one in _on_meta(config).parameters()), "1"))
        found = training_memory(config, (), MICRO_BATCH)
        rows += [row(f"{name}, {part}", value, "GB") for part, value in found.items()]
    kept = sum(tensor.nbytes for tensor in observations(1).tensors()) * ENVIRONMENTS * CHUNKS
    return [*rows, row(f"observations of {ENVIRONMENTS} environments, {CHUNKS} chunks", kept / 1e9, "GB")]


def policy_memory(config: Any) -> list[Row]:
    """Of training all of a policy where that can be, and of training it with a frozen encoder, without a device."""
    policy = _on_meta(config)
    rows = [row("parameters", sum(parameter.numel() for parameter in policy.parameters()), "1")]
    all_trained: list[tuple[str, ...]] = [] if half_precision_groups(policy) else [()]
    for frozen in [*all_trained, ("encoder",)] if "encoder" in policy.parameter_groups() else all_trained:
        set_frozen(policy, frozen)
        name = "encoder frozen" if frozen else "all trained"
        rows.append(row(f"{name}: trained parameters", sum(one.numel() for one in trained_parameters(policy)), "1"))
        rows += [row(f"{name}: {part}", value, "GB") for part, value in training_memory(config, frozen).items()]
        rows.append(row(f"{name}: kept of one observation", _kept_bytes(policy) / 1e9, "GB"))
    if hasattr(config, "prefix_precision"):
        halved = training_memory(replace(config, prefix_precision="bfloat16"), ("encoder",))
        rows += [row(f"encoder frozen, in bfloat16: {part}", value, "GB") for part, value in halved.items()]
    return rows


def training_memory(config: Any, frozen: Sequence[str] = (), batch: int = 1) -> dict[str, float]:
    """[GB] Of updates of what is not ``frozen`` on a micro-batch that a rollout kept: log-prob, backward, AdamW.

    The parts add up to the peak. AdamW's temporaries are those it has on a GPU, one more copy of the trained weights.
    """
    with OneFakeMode(), Storages() as storages:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch's own, in a deep copy
            policy = build_policy(config, EXAMPLE_ROBOT)
        set_frozen(policy, frozen)
        work = _warm_update(policy, batch)
        storages.peak = storages.now
        work()
    weights = sum(parameter.nbytes for parameter in policy.parameters())
    state = sum(3 * parameter.nbytes for parameter in trained_parameters(policy))  # gradient and AdamW's two averages
    return {
        "weights": weights / 1e9,
        "gradients and AdamW": state / 1e9,
        f"activations and temporaries, micro-batch {batch}": (storages.peak - weights - state) / 1e9,
        f"training in all, micro-batch {batch}": storages.peak / 1e9,
    }


def _warm_update(policy: Policy, batch: int) -> Callable[[], None]:
    """An update of which AdamW has its averages already."""
    with torch.no_grad():
        context, _ = policy.encode(observations(batch), policy.initial_state(batch))
        record, trace = policy.store(context), policy.sample(context, torch.Generator()).trace
    optimizer = torch.optim.AdamW(trained_parameters(policy), foreach=True)
    for parameter in trained_parameters(policy):
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return lambda: update(policy, record, trace, optimizer)


class OneFakeMode(FakeTensorMode):
    """Stays the mode of modules that are deep-copied while they are built; tensors of two modes do not mix."""

    def __deepcopy__(self, memo: dict[int, Any]) -> OneFakeMode:
        return self


class Storages(TorchDispatchMode):
    """Bytes of the tensors that were made inside and still exist: ``now``, and their ``peak``."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.peak, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address not in self.known:
            self.known.add(address)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._remove, address, size)

    def _remove(self, address: int, size: int) -> None:
        self.known.remove(address)
        self.now -= size


def _on_meta(config: Any) -> Policy:
    with torch.device("meta"):
        return build_policy(config, EXAMPLE_ROBOT)


def _kept_bytes(policy: Policy) -> int:
    """What a rollout keeps of one observation beside its trace."""
    context, _ = policy.encode(observations(1).to("meta"), policy.initial_state(1))
    return sum(tensor.nbytes for tensor in policy.store(context).tensors())
