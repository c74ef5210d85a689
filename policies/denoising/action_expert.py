"""The action expert: a transformer over action tokens that denoises a chunk given an encoded observation.

Adaptive LayerNorm on flow time (DiT's AdaLN-zero, Peebles & Xie 2023), cross-attention to the observation's tokens,
whose keys and values are computed once per observation (prefill).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from policies.compact_encoder import Encoding, merge_heads, split_heads
from policies.denoising.kernels import Prediction
from sims.numbers.ranges import Depth, Width


@dataclass(frozen=True, kw_only=True)
class ActionExpertConfig:
    """``action_patch`` actions form one token (1: every action its own). Its width is the encoder's."""

    depth: Depth = 2
    heads: Width = 4
    mlp_ratio: Width = 2
    time_width: Width = 64
    action_patch: Width = 8


@dataclass(frozen=True, kw_only=True)
class Prefill:
    """What does not depend on x_t and t.

    ``summary`` [B, 1, 1, width]; ``anchor`` [B, 1, H, A], the action regressed without denoising; ``keys_values`` of
    each block (the KV cache).
    """

    summary: Tensor
    anchor: Tensor
    keys_values: list[tuple[Tensor, Tensor]]


class ActionExpert(nn.Module):
    """Predicts the objective's target at x_t. Time adapts every LayerNorm; gates and the last layer start at zero."""

    def __init__(
        self, config: ActionExpertConfig, *, width: int, action_horizon: int, action_dim: int, pooled_width: int
    ) -> None:
        super().__init__()
        if action_horizon % config.action_patch:
            raise ValueError(
                f"expert.action_patch must divide action_horizon {action_horizon}, got {config.action_patch}"
            )
        if width % config.heads:
            raise ValueError(f"encoder.width must be a multiple of expert.heads {config.heads}, got {width}")
        self.config, self.action_horizon = config, action_horizon
        tokens = action_horizon // config.action_patch
        # Each action's own time is an input beside it, which marks a clean prefix inside one token.
        self.inputs = nn.Linear(config.action_patch * (action_dim + 1), width)
        self.position = nn.Parameter(0.02 * torch.randn(tokens, width))
        self.pooled = nn.Sequential(nn.Linear(pooled_width, width), nn.GELU(), nn.Linear(width, width))
        self.time = nn.Sequential(nn.Linear(config.time_width, config.time_width), nn.SiLU())
        self.blocks = nn.ModuleList([_ExpertBlock(config, width=width, attend=tokens > 1) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.adapt = nn.Linear(config.time_width, 2 * width)
        self.target = nn.Linear(width, config.action_patch * action_dim)
        self.anchor = nn.Linear(width, action_horizon * action_dim)
        self.noise: nn.Linear | None = None
        for layer in (self.adapt, self.target):
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)

    def prefill(self, encoding: Encoding) -> Prefill:
        """Once per observation."""
        summary = self.pooled(encoding.pooled)
        anchor = self.anchor(summary).unflatten(-1, (self.action_horizon, -1)).unsqueeze(1)
        return Prefill(
            summary=summary[:, None, None],
            anchor=anchor,
            keys_values=[block.prefill(encoding.tokens) for block in self.blocks],  # type: ignore[operator]
        )

    def forward(self, x_t: Float[Tensor, "B S H A"], t: Tensor, prefill: Prefill) -> Prediction:
        """t: [B or 1, S], or [B, S, H] where actions have their own time. S: steps that share one context."""
        batch, steps, horizon, action_dim = x_t.shape
        times = (t if t.ndim == 3 else t.unsqueeze(-1)).unsqueeze(-1).expand(-1, -1, horizon, 1)
        patched = torch.cat([x_t, times.expand(batch, -1, -1, -1)], dim=-1)
        patched = patched.view(batch, steps, -1, self.config.action_patch * (action_dim + 1))
        x = self.inputs(patched) + self.position + prefill.summary
        per_token = times.reshape(*times.shape[:2], -1, self.config.action_patch).mean(-1)
        if t.ndim == 2:
            per_token = per_token[..., :1]
        condition = self.time(_sinusoid(per_token, self.config.time_width))  # [B or 1, S, tokens or 1, time_width]
        for block, keys_values in zip(self.blocks, prefill.keys_values, strict=True):
            x = block(x, condition, keys_values)
        shift, scale = self.adapt(condition).chunk(2, dim=-1)
        x = torch.addcmul(shift, self.norm(x), 1 + scale)
        noise = None if self.noise is None else self.noise(x).view(x_t.shape)
        return Prediction(target=self.target(x).view(x_t.shape), noise=noise)


class _ExpertBlock(nn.Module):
    """Self-attention over action tokens (if several), cross-attention to the context, MLP; DiT's AdaLN-zero."""

    def __init__(self, config: ActionExpertConfig, *, width: int, attend: bool) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv = nn.Linear(width, 3 * width) if attend else None
        self.self_out = nn.Linear(width, width) if attend else None
        self.query = nn.Linear(width, width)
        self.keys_values = nn.Linear(width, 2 * width)
        self.cross_out = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, config.mlp_ratio * width), nn.GELU(), nn.Linear(config.mlp_ratio * width, width)
        )
        self.adapt = nn.Linear(config.time_width, (9 if attend else 6) * width)
        nn.init.zeros_(self.adapt.weight)
        nn.init.zeros_(self.adapt.bias)

    def prefill(self, tokens: Float[Tensor, "B context width"]) -> tuple[Tensor, Tensor]:
        keys, values = self.keys_values(tokens).chunk(2, dim=-1)
        return split_heads(keys, self.heads), split_heads(values, self.heads)

    def forward(self, x: Tensor, condition: Tensor, keys_values: tuple[Tensor, Tensor]) -> Tensor:
        """x: [B, S, tokens, width]; every step S attends to the same context, and to itself alone."""
        batch, steps, tokens, width = x.shape
        adapted = self.adapt(condition).chunk(9 if self.qkv is not None else 6, dim=-1)
        if self.qkv is not None and self.self_out is not None:
            shift, scale, gate = adapted[6:]
            flat = torch.addcmul(shift, self.norm(x), 1 + scale).view(batch * steps, tokens, width)
            q, k, v = (split_heads(part, self.heads) for part in self.qkv(flat).chunk(3, dim=-1))
            attended = self.self_out(merge_heads(F.scaled_dot_product_attention(q, k, v)))
            x = torch.addcmul(x, gate, attended.view(x.shape))
        shift, scale, gate = adapted[:3]
        query = self.query(torch.addcmul(shift, self.norm(x), 1 + scale)).view(batch, steps * tokens, width)
        attended = merge_heads(F.scaled_dot_product_attention(split_heads(query, self.heads), *keys_values))
        x = torch.addcmul(x, gate, self.cross_out(attended).view(x.shape))
        shift, scale, gate = adapted[3:6]
        return torch.addcmul(x, gate, self.mlp(torch.addcmul(shift, self.norm(x), 1 + scale)))


def _sinusoid(t: Tensor, width: int) -> Tensor:
    """Sines and cosines of periods .01 to 4, [..., width]."""
    periods = torch.logspace(math.log10(0.01), math.log10(4.0), width // 2, device=t.device, dtype=t.dtype)
    angle = t.unsqueeze(-1) * (2 * math.pi / periods)
    return torch.cat([angle.sin(), angle.cos()], dim=-1)
