"""The transformer decoder that these models share: Gemma, Llama, and the action experts beside them.

One layer serves the language model and the expert, returns its keys and values (the KV cache) with its output, and may
be recomputed in the backward pass; the layers of ``transformers`` return no cache when they are recomputed. Parameters
have the published names. tests/policies/pretrained holds it to ``transformers``' own models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policies.device import Precision
from policies.pretrained.matrices import store_matrices
from sims.numbers.ranges import Depth, Interval, PositiveFloat, Width

KeysValues = tuple[Tensor, Tensor]
Rotation = tuple[Tensor, Tensor]


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """``family`` gemma: norms scale by 1 + weight, GELU; llama: by weight, SiLU. ``kv_heads`` share among ``heads``."""

    width: Width
    mlp_width: Annotated[int, Interval(ge=1, le=10**6)]
    depth: Depth
    heads: Width
    kv_heads: Width
    head_dim: Width
    family: Literal["gemma", "llama"] = "gemma"
    norm_eps: PositiveFloat = 1e-6

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ValueError(f"heads must be a multiple of kv_heads {self.kv_heads}, got {self.heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim must be even, got {self.head_dim}")


def check_expert(expert: DecoderConfig, language: DecoderConfig) -> None:
    """An expert that attends to the language model's keys and values layer by layer has its layout. ValueError."""
    for name in ("depth", "heads", "kv_heads", "head_dim"):
        own, other = getattr(expert, name), getattr(language, name)
        if own != other:
            raise ValueError(f"policy.expert.{name} must be the language model's, {other}, got {own}")


class RMSNorm(nn.Module):
    """Root mean square norm in float32 (Zhang & Sennrich 2019); Gemma's weight is an offset from 1."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.offset, self.eps = float(config.family == "gemma"), config.norm_eps
        self.weight = nn.Parameter(torch.full((config.width,), 1 - self.offset))

    def forward(self, x: Float[Tensor, "B N width"], condition: None = None) -> tuple[Tensor, None]:
        weight = self.weight.float() + self.offset
        return F.rms_norm(x.float(), weight.shape, weight, self.eps).to(x.dtype), None


class AdaptiveRMSNorm(nn.Module):
    """pi0.5's norm: ``dense`` of the condition gives scale, shift and the gate of the residual (openpi, gemma.py)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.eps = config.norm_eps
        self.dense = nn.Linear(config.width, 3 * config.width)
        nn.init.zeros_(self.dense.weight)
        nn.init.zeros_(self.dense.bias)

    def forward(self, x: Float[Tensor, "B N width"], condition: Float[Tensor, "B S width"]) -> tuple[Tensor, Tensor]:
        """The N tokens are S groups, one after the other, with a condition each. The normed x, and the gate."""
        adapted = self.dense(condition).repeat_interleave(x.shape[1] // condition.shape[1], dim=1)
        scale, shift, gate = adapted.chunk(3, dim=-1)
        normed = F.rms_norm(x.float(), x.shape[-1:], eps=self.eps)
        return (normed * (1 + scale.float()) + shift.float()).to(x.dtype), gate


class Attention(nn.Module):
    """Queries of ``config.heads``; keys and values of ``kv_heads``, to which earlier ones are put in front."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.config = config
        query_width, kv_width = config.heads * config.head_dim, config.kv_heads * config.head_dim
        self.q_proj = nn.Linear(config.width, query_width, bias=False)
        self.k_proj = nn.Linear(config.width, kv_width, bias=False)
        self.v_proj = nn.Linear(config.width, kv_width, bias=False)
        self.o_proj = nn.Linear(query_width, config.width, bias=False)

    def forward(
        self, x: Tensor, mask: Tensor, rotation: Rotation, past: KeysValues | None
    ) -> tuple[Tensor, KeysValues]:
        q, k, v = (
            project(x).unflatten(-1, (-1, self.config.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, rotation), rotate(k, rotation)
        keys, values = (k, v) if past is None else (join(past[0], k), join(past[1], v))
        return self.o_proj(attend(q, keys, values, mask)), (k, v)


class MLP(nn.Module):
    """Gated: down(activation(gate(x)) up(x))."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.gelu = config.family == "gemma"
        self.gate_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.up_proj = nn.Linear(config.width, config.mlp_width, bias=False)
        self.down_proj = nn.Linear(config.mlp_width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        active = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        return self.down_proj(active * self.up_proj(x))


class DecoderLayer(nn.Module):
    def __init__(self, config: DecoderConfig, *, adaptive: bool) -> None:
        super().__init__()
        norm = AdaptiveRMSNorm if adaptive else RMSNorm
        self.input_layernorm = norm(config)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = norm(config)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, mask: Tensor, rotation: Rotation, past: KeysValues | None, condition: Tensor | None
    ) -> tuple[Tensor, KeysValues]:
        normed, gate = self.input_layernorm(x, condition)
        attended, keys_values = self.self_attn(normed, mask, rotation, past)
        x = _residual(x, attended, gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return _residual(x, self.mlp(normed), gate), keys_values


class Decoder(nn.Module):
    """Layers and final norm, on embeddings. ``adaptive``: its norms take a condition (pi0.5's expert).

    ``stored``: of its matrices, layer by layer as they are made, so that a large model never exists in float32.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        adaptive: bool = False,
        checkpointing: bool = False,
        stored: Precision = "float32",
    ) -> None:
        super().__init__()
        self.config, self.checkpointing = config, checkpointing
        layers = [store_matrices(DecoderLayer(config, adaptive=adaptive), stored) for _ in range(config.depth)]
        self.layers = nn.ModuleList(layers)
        self.norm = AdaptiveRMSNorm(config) if adaptive else RMSNorm(config)

    def forward(
        self,
        x: Float[Tensor, "B N width"],
        *,
        mask: Bool[Tensor, "B 1 Q M"],
        positions: Int[Tensor, "B N"],
        past: Float[Tensor, "B L 2 kv_heads P head_dim"] | None = None,
        condition: Float[Tensor, "B S width"] | None = None,
    ) -> tuple[Float[Tensor, "B N width"], list[KeysValues]]:
        """The output, and each layer's keys (after rotation) and values.

        ``mask``: True where a query (Q is N, or 1 for all) may attend to one of the M = P + N keys, ``past`` first.
        """
        rotation = rotation_of(positions, self.config.head_dim)
        mask = per_head(mask, self.config)
        cache = []
        for i, layer in enumerate(self.layers):
            before = None if past is None else (past[:, i, 0], past[:, i, 1])
            x, keys_values = self.run_layer(layer, x, mask, rotation, before, condition)
            cache.append(keys_values)
        return self.norm(x, condition)[0], cache

    def run_layer(self, layer: nn.Module, *inputs: Any) -> tuple[Tensor, KeysValues]:
        """``layer(*inputs)``, recomputed in the backward pass if ``checkpointing``."""
        if self.checkpointing and torch.is_grad_enabled():
            return checkpoint(layer, *inputs, use_reentrant=False)
        return layer(*inputs)

    def behind_the_cache(self) -> list[nn.Parameter]:
        """The parameters that no key and no value depends on: the end of the last layer, and the final norm."""
        last: DecoderLayer = self.layers[-1]  # type: ignore[assignment]
        modules = (last.self_attn.q_proj, last.self_attn.o_proj, last.post_attention_layernorm, last.mlp, self.norm)
        return [parameter for module in modules for parameter in module.parameters()]


def stack_cache(cache: list[KeysValues]) -> Float[Tensor, "B L 2 kv_heads N head_dim"]:
    """As ``Decoder`` takes it as ``past``."""
    return torch.stack([torch.stack(pair, dim=1) for pair in cache], dim=1)


def attend(
    q: Float[Tensor, "B heads N head_dim"],
    k: Float[Tensor, "B kv_heads M head_dim"],
    v: Float[Tensor, "B kv_heads M head_dim"],
    mask: Bool[Tensor, "B 1 Q M"],
) -> Float[Tensor, "B N heads_width"]:
    """Attention of all heads that share keys as one longer query, so that nothing is repeated; mask: ``per_head``."""
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    attended = F.scaled_dot_product_attention(grouped, k, v, attn_mask=mask)
    return attended.unflatten(2, (-1, q.shape[2])).flatten(1, 2).transpose(1, 2).flatten(2)


def per_head(mask: Bool[Tensor, "B 1 Q M"], config: DecoderConfig) -> Bool[Tensor, "B 1 GQ M"]:
    """The mask of ``attend``: repeated for the heads that share keys, unless it is the same for all queries."""
    return mask if mask.shape[2] == 1 else mask.repeat(1, 1, config.heads // config.kv_heads, 1)


def rotation_of(positions: Int[Tensor, "B N"], head_dim: int) -> Rotation:
    """Cosines and sines of rotary position embedding with base 10,000 (Su et al. 2021), [B, 1, N, head_dim]."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angle = positions[..., None].float() / 10_000**exponent
    angle = torch.cat([angle, angle], dim=-1).unsqueeze(1)
    return angle.cos(), angle.sin()


def rotate(x: Float[Tensor, "B heads N head_dim"], rotation: Rotation) -> Float[Tensor, "B heads N head_dim"]:
    """The two halves of each head are the real and imaginary parts."""
    cos, sin = (part.to(x.dtype) for part in rotation)
    real, imaginary = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-imaginary, real], dim=-1) * sin


def join(past: Tensor, new: Tensor) -> Tensor:
    """Keys or values, [B, kv_heads, N, head_dim], one after the other."""
    return torch.cat([past.to(new.dtype), new], dim=2)


def _residual(x: Tensor, update: Tensor, gate: Tensor | None) -> Tensor:
    return x + update if gate is None else x + update * gate
