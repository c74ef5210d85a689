"""What the networks of flow-matching vision-language-action models have in common."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from policies.denoising.denoise import Predict
from policies.denoising.kernels import Prediction
from policies.pretrained.context import PrefixCache
from policies.pretrained.decoder import Decoder

PERIODS = (4e-3, 4.0)


class FlowNetwork(nn.Module, ABC):
    """An action expert beside a language model, whose keys and values it attends to."""

    language: Decoder

    def __init__(self, *, expert_width: int, padded_dim: int) -> None:
        super().__init__()
        self.action_out_proj = nn.Linear(expert_width, padded_dim)
        self.noise_head: nn.Linear | None = None

    @abstractmethod
    def bind(self, cache: PrefixCache, state: Float[Tensor, "B padded"]) -> Predict:
        """The flow's velocity given an observation, float32.

        It takes x_t [B, S, chunk, padded] and t [B or 1, S]; the S steps share the context and do not see each other.
        """

    def read_out(self, hidden: Float[Tensor, "B S chunk width"]) -> Prediction:
        """Velocity and noise, from the expert's output at the actions."""
        hidden = hidden.to(self.action_out_proj.weight.dtype)
        noise = None if self.noise_head is None else self.noise_head(hidden).float()
        return Prediction(target=self.action_out_proj(hidden).float(), noise=noise)


def suffix_mask(
    valid: Bool[Tensor, "B P"], block: Bool[Tensor, "n n"], steps: int
) -> Bool[Tensor, "B 1 suffix P_plus_suffix"]:
    """Who may attend to whom: S steps see the prefix and themselves, ``block`` says who sees whom within a step.

             prefix   step 1   step 2
    step 1   valid    block    .
    step 2   valid    .        block
    """
    own = torch.block_diag(*[block] * steps).bool()
    return torch.cat(
        [valid[:, None, None].expand(-1, 1, len(own), -1), own.expand(len(valid), 1, -1, -1)],
        dim=-1,
    )


def sinusoid(t: Float[Tensor, "*B"], width: int) -> Float[Tensor, "*B width"]:
    """Sines, then cosines, of periods 4e-3 to 4, in float64: the shortest period multiplies an error in t by 1570."""
    share = torch.linspace(0, 1, width // 2, dtype=torch.float64, device=t.device)
    period = PERIODS[0] * (PERIODS[1] / PERIODS[0]) ** share
    angle = t.double().unsqueeze(-1) * (2 * math.pi / period)
    return torch.cat([angle.sin(), angle.cos()], dim=-1).float()
