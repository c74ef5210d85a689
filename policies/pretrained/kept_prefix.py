"""What published policies have in common that encode an observation once: how a checkpoint is read into them, and where
they keep what a frozen prefix made."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policies.device import Precision
from policies.normalizer import Normalizer
from policies.policy import C, Policy, T
from policies.pretrained.checkpoint import Layout, PublishedWeights, load_published
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.matrices import lower_precision
from policies.pretrained.tokenizer import PromptTokenizer
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import Observation


class KeptPrefix(Policy[C, T]):
    """Its context has ``obs``, its configuration ``convention``, ``storage`` and ``prefix_precision``.

    A record is the context without its observation, or the observation alone: where the prefix is trained, and where
    ``storage`` has no room for as many records as are planned. It is in the host's memory but where ``storage`` says
    device.
    """

    can_be_traced = False  # the tokenizer is not a computation of tensors
    network: nn.Module
    tokenizer: PromptTokenizer
    normalizer: Normalizer
    layout: Layout
    state_quantiles: tuple[float, float] | None = None  # of ``Normalizer.fit``
    _planned, _in_host = 0, False

    def fit_normalizer(self, state: Float[Tensor, "N state_dim"], action: Float[Tensor, "M action_dim"]) -> None:
        self.config.convention.refuse_fitting()
        self.normalizer.fit(state, action, state_quantiles=self.state_quantiles)

    def load_published(self, weights: PublishedWeights) -> list[str]:
        """Weights, scales and tokenizer of a checkpoint; the names of its dead weights. CheckpointError."""
        dead = load_published(self.network, self.normalizer, weights, self.layout)
        self.tokenizer.load(weights.tokenizer)
        return dead

    @property
    def compiled_modules(self) -> Iterable[nn.Module]:
        """The parts of ``network``, which is itself called by other names."""
        return self.network.children()

    @property
    @abstractmethod
    def record_bytes(self) -> int:
        """Of what the prefix makes of one observation, without the little beside it."""

    @property
    def computes_in(self) -> Precision:
        """The prefix."""
        return lower_precision(self.precision, self.config.prefix_precision)

    def plan_storage(self, records: int, *, in_host: bool = False) -> None:
        self._planned, self._in_host = records, in_host

    def store(self, context: C) -> TensorDataclass:
        kept: Any = context
        place = self.config.storage.place(self.record_bytes, self._planned, in_host=self._in_host)
        if place == "recompute" or self._prefix_is_trained:
            assert kept.obs is not None
            kept = kept.obs
        else:
            kept = replace(kept, obs=None)
        if place == "device":
            return kept
        with crossing("prefixes"):
            return kept.to("cpu")

    def stored_on(self, records: int) -> torch.device:
        place = self.config.storage.place(self.record_bytes, records)
        return self.device if place == "device" else torch.device("cpu")

    def restore(self, record: TensorDataclass) -> Any:
        with crossing("prefixes"):
            record = record.to(self.device)
        if isinstance(record, Observation):
            return self.encode(record, self.initial_state(len(record)))[0]
        return record

    @property
    def _prefix_is_trained(self) -> bool:
        groups = self.parameter_groups()
        return any(parameter.requires_grad for name in ("encoder", "lora") for parameter in groups.get(name, ()))


def numbers_bytes(numbers: int, precision: Precision) -> int:
    return numbers * (2 if precision == "bfloat16" else 4)


def cached_numbers(language: DecoderConfig, tokens: int) -> int:
    """Keys and values of all layers."""
    return 2 * language.depth * language.kv_heads * language.head_dim * tokens
