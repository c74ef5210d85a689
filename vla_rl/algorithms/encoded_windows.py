"""Windows whose observations are encoded once, for behavior cloning with a frozen encoder.

Many updates then cost one encoding of each observation; the encodings of all windows are held in the device's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from episodes.sampler import Targets, WindowBatch, WindowSampler
from policies.policy import Policy
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation
from vla_rl.heartbeat import beat

ENCODED_AT_ONCE = 256


@dataclass(frozen=True, kw_only=True)
class EncodedBatch(TensorDataclass):
    """``inputs``: what ``Policy.store`` keeps of an observation's context."""

    inputs: TensorDataclass
    targets: Targets


def encode_batch(policy: Policy, batch: WindowBatch) -> Any:
    """Context of each window's observation, with the memory that a rollout has of the decisions before it."""
    state = policy.initial_state(len(batch))
    if batch.past is not None:
        for k in range(batch.past.state.shape[1]):
            state = policy.remember(batch.past[:, k], state)
    return policy.encode(batch.obs, state)[0]


@torch.no_grad()
def encode_windows(policy: Policy, sampler: WindowSampler, indices: np.ndarray) -> EncodedBatch:
    with crossing("batches"):
        batch = sampler.windows(indices).to(policy.device)
    inputs = policy.store(encode_batch(policy, batch))
    beat()
    return EncodedBatch(inputs=inputs, targets=batch.targets)


def is_encoding_trained(policy: Policy, sampler: WindowSampler) -> bool:
    """Whether a parameter that is not frozen makes the context of an observation."""
    with crossing("batches"):
        batch = sampler.windows(np.arange(1)).to(policy.device)
    return any(tensor.requires_grad for tensor in encode_batch(policy, batch).tensors())


def encodings_are_constant(policy: Policy, samplers: Sequence[WindowSampler]) -> bool:
    """Whether something is frozen, and what the policy stores are therefore encodings and not observations.

    The windows of all ``samplers`` are to be kept together.
    """
    if all(parameter.requires_grad for group in policy.parameter_groups().values() for parameter in group):
        return False
    policy.plan_storage(sum(map(len, samplers)))
    record = encode_windows(policy, samplers[0], np.arange(1)).inputs
    with torch.enable_grad():
        trained = any(tensor.requires_grad for tensor in policy.restore(record).tensors())
    return not trained and not isinstance(record, Observation)


class EncodedWindows:
    """The batches of ``sampler``, in its order, encoded by ``policy`` as it is now."""

    def __init__(self, sampler: WindowSampler, policy: Policy) -> None:
        self._sampler, self._device = sampler, policy.device
        parts = np.array_split(np.arange(len(sampler)), -(-len(sampler) // ENCODED_AT_ONCE))
        self._windows = EncodedBatch.cat([encode_windows(policy, sampler, part) for part in parts])

    def next_batch(self) -> EncodedBatch:
        index, windows = torch.from_numpy(self._sampler.next_indices()), self._windows
        kept_on = next(windows.inputs.tensors()).device  # the host, where ``Policy.store`` has no room on the device
        with crossing("batches"):
            there, here = index.to(kept_on), index.to(self._device)
        return EncodedBatch(inputs=windows.inputs[there], targets=windows.targets[here])

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
