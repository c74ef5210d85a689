"""How weights get from the learner to whoever acts with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

CRITIC = "critic/"


@runtime_checkable
class WeightStore(Protocol):
    """Versioned weights. One process: a reference; a cluster: an object store; robots: bundle files."""

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Make ``tensors`` (``named_weights``) the newest; versions increase."""
        ...

    def newest(self, after: int) -> tuple[int, Mapping[str, Tensor]] | None:
        """The newest version and its tensors, or None if it is not newer than ``after``."""
        ...


class LocalWeights:
    """A WeightStore within one process: keeps the newest tensors by reference."""

    def __init__(self) -> None:
        self._newest: tuple[int, Mapping[str, Tensor]] | None = None

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        self._newest = version, tensors

    def newest(self, after: int) -> tuple[int, Mapping[str, Tensor]] | None:
        return self._newest if self._newest is not None and self._newest[0] > after else None


def named_weights(policy: nn.Module, critic: nn.Module | None) -> dict[str, Tensor]:
    """What changes in training, by name in the policy's state_dict; the critic's names begin with CRITIC."""
    named = dict(policy.named_parameters())
    if critic is not None:
        named |= {CRITIC + name: value for name, value in critic.named_parameters()}
    return {name: value for name, value in named.items() if value.requires_grad}


@torch.no_grad()
def load_weights(policy: nn.Module, critic: nn.Module | None, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` (``named_weights``) into both, except those that are their own. KeyError: unknown name."""
    own = policy.state_dict(keep_vars=True)
    if critic is not None:
        own |= {CRITIC + name: value for name, value in critic.state_dict(keep_vars=True).items()}
    for name, tensor in tensors.items():
        if own[name] is not tensor:
            own[name].copy_(tensor)
