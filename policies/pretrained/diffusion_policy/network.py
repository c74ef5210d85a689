"""The noise predictors of Diffusion Policy (Chi et al. 2023, arXiv:2303.04137): a UNet and a transformer.

Both take actions [B, chunk, A], the level of noise 0 .. levels - 1 of each sample, and the encoded observations.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from policies.pretrained.diffusion_policy.config import DiffusionTransformerConfig, UNetConfig


class _TimeEmbedding(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, level: Int[Tensor, " B"]) -> Float[Tensor, "B width"]:
        half = self.width // 2
        exponent = torch.arange(half, device=level.device) * -(math.log(10_000) / (half - 1))
        angle = level[:, None] * exponent.exp()
        return torch.cat([angle.sin(), angle.cos()], dim=-1)


class _ConvBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, config: UNetConfig) -> None:
        super().__init__()
        size = config.kernel_size
        self.block = nn.Sequential(
            nn.Conv1d(inputs, outputs, size, padding=size // 2), nn.GroupNorm(config.groups, outputs), nn.Mish()
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class _ResidualBlock(nn.Module):
    """Two convolutions; the condition scales and shifts between them (FiLM, Perez et al. 2018)."""

    def __init__(self, inputs: int, outputs: int, condition: int, config: UNetConfig) -> None:
        super().__init__()
        self.conv1, self.conv2 = _ConvBlock(inputs, outputs, config), _ConvBlock(outputs, outputs, config)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, 2 * outputs))
        self.residual_conv = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        scale, shift = self.cond_encoder(condition).unsqueeze(-1).chunk(2, dim=1)
        return self.conv2(scale * self.conv1(x) + shift) + self.residual_conv(x)


class UNet(nn.Module):
    def __init__(self, config: UNetConfig, *, action_dim: int, obs_steps: int, obs_width: int) -> None:
        super().__init__()
        time = config.time_width
        self.diffusion_step_encoder = nn.Sequential(
            _TimeEmbedding(time), nn.Linear(time, 4 * time), nn.Mish(), nn.Linear(4 * time, time)
        )
        condition, widths = time + obs_steps * obs_width, config.widths

        def pair(inputs: int, outputs: int) -> list[nn.Module]:
            first = _ResidualBlock(inputs, outputs, condition, config)
            return [first, _ResidualBlock(outputs, outputs, condition, config)]

        down: list[nn.Module] = []
        for i, (before, after) in enumerate(pairwise((action_dim, *widths))):
            shrink = nn.Conv1d(after, after, 3, 2, 1) if i < len(widths) - 1 else nn.Identity()
            down.append(nn.ModuleList([*pair(before, after), shrink]))
        self.down_modules = nn.ModuleList(down)
        self.mid_modules = nn.ModuleList(pair(widths[-1], widths[-1]))
        up = [
            nn.ModuleList([*pair(2 * after, before), nn.ConvTranspose1d(before, before, 4, 2, 1)])
            for before, after in reversed(list(pairwise(widths)))
        ]
        self.up_modules = nn.ModuleList(up)
        self.final_conv = nn.Sequential(_ConvBlock(widths[0], widths[0], config), nn.Conv1d(widths[0], action_dim, 1))

    def forward(
        self, x: Float[Tensor, "B chunk A"], level: Int[Tensor, " B"], obs: Float[Tensor, "B obs_steps obs_width"]
    ) -> Float[Tensor, "B chunk A"]:
        condition = torch.cat([self.diffusion_step_encoder(level), obs.flatten(1)], dim=-1)
        x, skipped = x.transpose(1, 2), []
        for stage in self.down_modules:
            x = _twice(stage, x, condition)
            skipped.append(x)
            x = stage[2](x)  # type: ignore[index]
        for block in self.mid_modules:
            x = block(x, condition)
        for stage in self.up_modules:
            x = stage[2](_twice(stage, torch.cat([x, skipped.pop()], dim=1), condition))  # type: ignore[index]
        return self.final_conv(x).transpose(1, 2)


def _twice(stage: nn.Module, x: Tensor, condition: Tensor) -> Tensor:
    """The two residual blocks of a stage."""
    return stage[1](stage[0](x, condition), condition)  # type: ignore[index]


class DiffusionTransformer(nn.Module):
    """Names of the original's ``TransformerForDiffusion``; an action sees what is not later than itself."""

    mask: Tensor
    memory_mask: Tensor

    def __init__(
        self, config: DiffusionTransformerConfig, *, action_dim: int, chunk: int, obs_steps: int, obs_width: int
    ) -> None:
        super().__init__()
        width, memory = config.width, 1 + obs_steps
        self.time_emb = _TimeEmbedding(width)
        self.input_emb, self.cond_obs_emb = nn.Linear(action_dim, width), nn.Linear(obs_width, width)
        self.pos_emb = nn.Parameter(0.02 * torch.randn(1, chunk, width))
        self.cond_pos_emb = nn.Parameter(0.02 * torch.randn(1, memory, width))
        self.encoder = nn.Sequential(nn.Linear(width, 4 * width), nn.Mish(), nn.Linear(4 * width, width))
        layer = nn.TransformerDecoderLayer(
            width, config.heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.decoder = nn.TransformerDecoder(layer, config.depth)
        self.ln_f, self.head = nn.LayerNorm(width), nn.Linear(width, action_dim)
        # The time is the first of the memory, and observation s is seen from action s on.
        unseen = torch.arange(chunk)[:, None] < torch.arange(memory) - 1
        self.register_buffer("memory_mask", unseen, persistent=False)
        self.register_buffer("mask", torch.ones(chunk, chunk, dtype=torch.bool).triu(1), persistent=False)

    def forward(
        self, x: Float[Tensor, "B chunk A"], level: Int[Tensor, " B"], obs: Float[Tensor, "B obs_steps obs_width"]
    ) -> Float[Tensor, "B chunk A"]:
        memory = torch.cat([self.time_emb(level).unsqueeze(1), self.cond_obs_emb(obs)], dim=1) + self.cond_pos_emb
        tokens = self.input_emb(x) + self.pos_emb
        # tgt_is_causal False takes the mask as it is; without it torch reads the mask, and a GPU waits.
        masks: dict[str, Any] = {"tgt_mask": self.mask, "memory_mask": self.memory_mask, "tgt_is_causal": False}
        hidden = self.decoder(tokens, self.encoder(memory), **masks)
        return self.head(self.ln_f(hidden))

    def train(self, mode: bool = True) -> DiffusionTransformer:
        """Always: in eval mode torch's attention rounds differently, and there is no dropout to turn off."""
        return super().train(True)
