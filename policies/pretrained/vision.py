"""Vision transformers: SigLIP (Zhai et al. 2023), with the published parameter names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policies.device import Precision
from policies.pretrained.matrices import store_matrices
from sims.numbers.ranges import Depth, Interval, Pixels, Width


@dataclass(frozen=True, kw_only=True)
class VisionConfig:
    """``image_size``: side of the square image in pixels, a multiple of ``patch_size``."""

    width: Width = 1152
    mlp_width: Annotated[int, Interval(ge=1, le=10**6)] = 4304
    depth: Depth = 27
    heads: Width = 16
    image_size: Pixels = 224
    patch_size: Pixels = 14

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size must be a multiple of patch_size {self.patch_size}, got {self.image_size}")
        if self.width % self.heads:
            raise ValueError(f"width must be a multiple of heads {self.heads}, got {self.width}")

    @property
    def tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2


class VisionEmbeddings(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.patch_embedding = nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size)
        self.position_embedding = nn.Embedding(config.tokens, config.width)

    def forward(self, images: Tensor) -> Tensor:
        return self.patch_embedding(images).flatten(2).transpose(1, 2) + self.position_embedding.weight


class VisionAttention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.q_proj, self.k_proj = nn.Linear(config.width, config.width), nn.Linear(config.width, config.width)
        self.v_proj, self.out_proj = nn.Linear(config.width, config.width), nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class VisionMLP(nn.Module):
    def __init__(self, config: VisionConfig, activation: Literal["tanh", "none"]) -> None:
        super().__init__()
        self.activation = activation
        self.fc1, self.fc2 = nn.Linear(config.width, config.mlp_width), nn.Linear(config.mlp_width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x), approximate=self.activation))


class VisionLayer(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(config.width, eps=1e-6)
        self.self_attn = VisionAttention(config)
        self.layer_norm2 = nn.LayerNorm(config.width, eps=1e-6)
        self.mlp = VisionMLP(config, "tanh")

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class VisionEncoder(nn.Module):
    def __init__(self, config: VisionConfig, stored: Precision) -> None:
        super().__init__()
        self.layers = nn.ModuleList([store_matrices(VisionLayer(config), stored) for _ in range(config.depth)])


class VisionTransformer(nn.Module):
    """Images to patch tokens. ``stored``: of the layers' matrices; the embeddings stay float32, as in openpi."""

    def __init__(self, config: VisionConfig, *, checkpointing: bool = False, stored: Precision = "float32") -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.embeddings = VisionEmbeddings(config)
        self.encoder = VisionEncoder(config, stored)
        self.post_layernorm = nn.LayerNorm(config.width, eps=1e-6)

    def forward(self, images: Float[Tensor, "B 3 side side"]) -> Float[Tensor, "B tokens width"]:
        """``images`` in [-1, 1]."""
        x = self.embeddings(images.to(self.embeddings.patch_embedding.weight.dtype))
        for layer in self.encoder.layers:
            if self.checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, use_reentrant=False)
            else:
                x = layer(x)
        return self.post_layernorm(x)
