"""Low-rank adaptation (Hu et al. 2022, arXiv:2106.09685) of linear layers in place, which keep their names.

Not ``peft``, which imports ``transformers`` and renames what it wraps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sims.numbers.ranges import Count, PositiveFloat

LORA = "lora_"  # what the names of the added parameters begin with


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """``rank`` 0: none. The update is B A x times ``alpha`` / rank, with B = 0 at the start."""

    rank: Count = 0
    alpha: PositiveFloat = 16.0

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"policy.lora.rank must not be negative, got {self.rank}")


class LoRALinear(nn.Linear):
    lora_a: nn.Parameter
    lora_b: nn.Parameter
    factor: float

    def forward(self, x: Tensor) -> Tensor:
        update = F.linear(F.linear(x.to(self.lora_a.dtype), self.lora_a), self.lora_b)
        own = F.linear(x, self.weight, self.bias)
        return own + self.factor * update.to(own.dtype)  # under autocast not x's: all that follows would be float32


def add_lora(modules: Iterable[nn.Module], config: LoRAConfig) -> None:
    """Adapt every linear layer in ``modules``; the added parameters are float32."""
    if not config.rank:
        return
    for module in modules:
        for layer in [one for one in module.modules() if type(one) is nn.Linear]:
            device = layer.weight.device
            layer.__class__ = LoRALinear
            adapted: LoRALinear = layer  # type: ignore[assignment]
            adapted.factor = config.alpha / config.rank
            adapted.lora_a = nn.Parameter(torch.randn(config.rank, layer.in_features, device=device) / config.rank)
            adapted.lora_b = nn.Parameter(torch.zeros(layer.out_features, config.rank, device=device))


def is_added(name: str) -> bool:
    """Whether a parameter of this name came with adaptation, so that no published file has it."""
    return name.rpartition(".")[2].startswith(LORA)


def lora_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for name, parameter in module.named_parameters() if is_added(name)]
