"""How weights get from the learner to whoever acts with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


@runtime_checkable
class WeightStore(Protocol):
    """Versioned weights. One process: a reference; a cluster: an object store; robots: bundle files."""

    def publish(self, version: int, tensors: Mapping[str, Tensor]) -> None:
        """Make ``tensors`` (name in the policy's state_dict -> value) the newest; versions increase."""
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


@torch.no_grad()
def load_weights(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copy ``tensors`` into the module, except those that are the module's own. KeyError for an unknown name."""
    own = module.state_dict(keep_vars=True)
    for name, tensor in tensors.items():
        if own[name] is not tensor:
            own[name].copy_(tensor)
