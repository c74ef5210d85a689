"""A transformer over blocks of tokens: attention is bidirectional within a block and causal across blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

Cache = tuple[Tensor, Tensor]
"""Keys and values, each [B, depth, heads, tokens, head width]; for a layer, without depth; or cosines and sines."""


class CausalTransformer(nn.Module):
    """A transformer over blocks of tokens. ``grid``: cameras, rows and columns of the tokens of a block."""

    cosine: Tensor
    sine: Tensor

    def __init__(self, *, width: int, depth: int, heads: int, grid: tuple[int, int, int]) -> None:
        super().__init__()
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        self.layers = nn.ModuleList([_Layer(width, heads) for _ in range(depth)])
        angle = _angles(width // heads, grid)
        self.register_buffer("cosine", angle.cos(), persistent=False)
        self.register_buffer("sine", angle.sin(), persistent=False)

    def forward(
        self,
        tokens: Float[Tensor, "B blocks tokens width"],
        condition: Float[Tensor, "B blocks width"],
        past: Cache | None = None,
    ) -> tuple[Float[Tensor, "B blocks tokens width"], Cache]:
        """Blocks that follow those of ``past``; the output and the keys and values of these blocks alone."""
        _, blocks, size, _ = tokens.shape
        modulation = self.modulation(condition).unflatten(-1, (6, 1, -1))  # [B, blocks, 6, 1, width]
        num_past = 0 if past is None else past[0].shape[-2] // size
        mask = None if blocks == 1 else block_causal(blocks, num_past, size, tokens.device)
        rotation = self.cosine.repeat(blocks, 1), self.sine.repeat(blocks, 1)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            before = None if past is None else (past[0][:, i], past[1][:, i])
            tokens, (key, value) = layer(tokens, modulation, rotation, mask, before)
            keys.append(key)
            values.append(value)
        return tokens, (torch.stack(keys, dim=1), torch.stack(values, dim=1))


class _Layer(nn.Module):
    """Attention with normalized queries and keys, then an MLP, each shifted, scaled and gated by the condition."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.offset = nn.Parameter(0.02 * torch.randn(6, 1, width))
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm_q, self.norm_k = nn.RMSNorm(width // heads), nn.RMSNorm(width // heads)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU("tanh"), nn.Linear(4 * width, width))

    def forward(
        self, x: Tensor, modulation: Tensor, rotation: Cache, mask: Tensor | None, past: Cache | None
    ) -> tuple[Tensor, Cache]:
        shift1, scale1, gate1, shift2, scale2, gate2 = (modulation + self.offset).unbind(2)
        mixed, cache = self._attend(torch.addcmul(shift1, self.norm1(x), 1 + scale1), rotation, mask, past)
        x = x + gate1 * mixed
        return x + gate2 * self.mlp(torch.addcmul(shift2, self.norm2(x), 1 + scale2)), cache

    def _attend(self, x: Tensor, rotation: Cache, mask: Tensor | None, past: Cache | None) -> tuple[Tensor, Cache]:
        q, k, v = self.qkv(x.flatten(1, 2)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        # In float32, because in bfloat16 rms_norm warns and does not use its fused implementation.
        q, k = (_rotate(norm(x.float()), rotation).to(v) for norm, x in ((self.norm_q, q), (self.norm_k, k)))
        keys, values = (k, v) if past is None else (torch.cat([past[0], k], 2), torch.cat([past[1], v], 2))
        mixed = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        return self.out(mixed.transpose(1, 2).flatten(2)).view_as(x), (k, v)


def block_causal(blocks: int, num_past: int, size: int, device: torch.device) -> Bool[Tensor, "queries keys"]:
    """True where a token attends: new blocks (of ``size`` tokens) to all past ones, earlier new ones and themselves."""
    query = torch.arange(num_past, num_past + blocks, device=device).repeat_interleave(size)
    key = torch.arange(num_past + blocks, device=device).repeat_interleave(size)
    return query[:, None] >= key


def _angles(width: int, grid: tuple[int, int, int]) -> Float[Tensor, "tokens half_width"]:
    """Rotary angles (Su et al. 2021, Eq. 15): half of the pairs rotate with the row, half with the column."""
    cameras, rows, columns = grid
    frequency = 100.0 ** -(torch.arange(width // 4) / (width // 4))
    row = torch.arange(rows).repeat_interleave(columns)[:, None] * frequency
    column = torch.arange(columns).repeat(rows)[:, None] * frequency
    return torch.cat([row, column], dim=1).repeat(cameras, 1)


def _rotate(x: Float[Tensor, "B heads tokens width"], rotation: Cache) -> Tensor:
    cosine, sine = rotation
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1)
