"""What a vision-language model makes of one observation, for an action expert to attend to."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation


@dataclass(frozen=True, kw_only=True)
class PrefixCache(TensorDataclass):
    """Keys and values of every layer for the P prefix tokens, and which of these exist.

    ``features``: mean over the valid tokens of the language model's last hidden state, for a critic.
    """

    keys_values: Float[Tensor, "*B L 2 kv_heads P head_dim"]
    valid: Bool[Tensor, "*B P"]
    features: Float[Tensor, "*B width"]

    @classmethod
    def of(cls, hidden: Float[Tensor, "B P width"], *, cache: Tensor, valid: Bool[Tensor, "B P"]) -> PrefixCache:
        """``hidden``: the language model's output."""
        weight = valid.unsqueeze(-1).float()
        return PrefixCache(keys_values=cache, valid=valid, features=(hidden.float() * weight).sum(1) / weight.sum(1))

    def padded(self, tokens: int) -> PrefixCache:
        """With ``tokens`` more that do not exist, so that the caches of batches with shorter prompts stack."""
        keys_values, valid = F.pad(self.keys_values, (0, 0, 0, tokens)), F.pad(self.valid, (0, tokens), value=False)
        return replace(self, keys_values=keys_values, valid=valid)


@dataclass(frozen=True, kw_only=True)
class VLAContext(TensorDataclass):
    """``state`` is the observation's, in environment units. ``obs``: for records that are encoded again."""

    cache: PrefixCache
    state: Float[Tensor, "*B state_dim"]
    obs: Observation | None
