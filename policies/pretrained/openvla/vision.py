"""DINOv2 and SigLIP with timm's parameter names, as OpenVLA's checkpoints have them, and their fusion."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from policies.device import Precision
from policies.pretrained.images import standardize_colors
from policies.pretrained.matrices import store_matrices
from policies.pretrained.openvla.config import OpenVLAConfig
from policies.pretrained.vision import VisionConfig, VisionMLP

REGISTERS = 4
# Mean and standard deviation of ImageNet's colors (DINOv2) and SigLIP's range, of images in [0, 1].
DINO_COLORS = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
SIGLIP_COLORS = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


class _Attention(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv, self.proj = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class _LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale_factor = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale_factor


class _Block(nn.Module):
    def __init__(self, config: VisionConfig, *, scaled: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width, eps=1e-6), nn.LayerNorm(config.width, eps=1e-6)
        self.attn, self.mlp = _Attention(config), VisionMLP(config, "none")
        self.ls1 = _LayerScale(config.width) if scaled else nn.Identity()
        self.ls2 = _LayerScale(config.width) if scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class _PatchEmbed(nn.Module):
    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.proj = nn.Conv2d(3, config.width, config.patch_size, stride=config.patch_size)


class TimmVision(nn.Module):
    """The patch tokens after ``config.depth`` blocks, without a final norm. DINOv2 has a class token and registers.

    ``stored``: of the blocks' matrices; the embeddings stay float32.
    """

    def __init__(self, config: VisionConfig, *, registers: bool, checkpointing: bool, stored: Precision) -> None:
        super().__init__()
        self.config, self.checkpointing, self.extra = config, checkpointing, 1 + REGISTERS if registers else 0
        self.patch_embed = _PatchEmbed(config)
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, config.tokens, config.width))
        if registers:
            self.cls_token = nn.Parameter(torch.zeros(1, 1, config.width))
            self.reg_token = nn.Parameter(torch.zeros(1, REGISTERS, config.width))
        blocks = [store_matrices(_Block(config, scaled=registers), stored) for _ in range(config.depth)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, images: Float[Tensor, "B 3 side side"]) -> Float[Tensor, "B tokens width"]:
        x = self.patch_embed.proj(images.to(self.pos_embed.dtype)).flatten(2).transpose(1, 2) + self.pos_embed
        if self.extra:
            x = torch.cat([self.cls_token.expand(len(x), -1, -1), self.reg_token.expand(len(x), -1, -1), x], dim=1)
        for block in self.blocks:
            recompute = self.checkpointing and torch.is_grad_enabled()
            x = checkpoint(block, x, use_reentrant=False) if recompute else block(x)
        return x[:, self.extra :]


class Projector(nn.Module):
    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        seen, width = config.dino.width + config.siglip.width, config.language.width
        self.fc1, self.fc2, self.fc3 = nn.Linear(seen, 4 * seen), nn.Linear(4 * seen, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(x)))))


class FusedVision(nn.Module):
    """Both models see the image, each in its own colors; their patch tokens are put side by side."""

    def __init__(self, config: OpenVLAConfig) -> None:
        super().__init__()
        options: dict[str, Any] = {"checkpointing": config.checkpointing, "stored": config.prefix_precision}
        self.featurizer = TimmVision(config.dino, registers=True, **options)
        self.fused_featurizer = TimmVision(config.siglip, registers=False, **options)

    def forward(self, images: Float[Tensor, "B 3 side side"]) -> Float[Tensor, "B tokens width"]:
        """``images`` in [0, 1]."""
        dino = self.featurizer(standardize_colors(images, *DINO_COLORS))
        return torch.cat([dino, self.fused_featurizer(standardize_colors(images, *SIGLIP_COLORS))], dim=-1)
