"""What a vision-language model makes of one observation, for an action expert to attend to."""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class VLAContext(TensorDataclass):
    """``state`` is the observation's, in environment units. ``obs``: for records that are encoded again."""

    cache: PrefixCache
    state: Float[Tensor, "*B state_dim"]
    obs: Observation | None
