"""The weights that get from the learner to whoever acts with them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

CRITIC = "critic/"


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
