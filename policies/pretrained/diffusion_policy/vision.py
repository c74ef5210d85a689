"""Diffusion Policy's image encoder: ResNet-18 with GroupNorm, keypoints by spatial softmax (torchvision's names)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from policies.pretrained.diffusion_policy.config import DiffusionPolicyConfig
from policies.pretrained.images import standardize_colors

CHANNELS_PER_GROUP = 16


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(max(1, channels // CHANNELS_PER_GROUP), channels)


class _Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), _norm(outputs)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), _norm(outputs)
        self.downsample: nn.Sequential | None = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class _Pool(nn.Module):
    """The expected position of each of ``keypoints`` maps (Finn et al. 2016, arXiv:1509.06113)."""

    def __init__(self, channels: int, keypoints: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, keypoints, 1)

    def forward(self, x: Float[Tensor, "N channels height width"]) -> Float[Tensor, "N two_keypoints"]:
        maps = self.nets(x)
        weight = maps.flatten(2).softmax(-1).unflatten(-1, maps.shape[2:])
        across, down = (torch.linspace(-1, 1, size, device=x.device) for size in (maps.shape[3], maps.shape[2]))
        return torch.stack([(weight.sum(2) * across).sum(-1), (weight.sum(3) * down).sum(-1)], dim=-1).flatten(1)


class ImageEncoder(nn.Module):
    def __init__(self, config: DiffusionPolicyConfig) -> None:
        super().__init__()
        self.config, widths = config, config.image_widths
        stages: list[nn.Module] = [
            nn.Conv2d(3, widths[0], 7, 2, 3, bias=False),
            _norm(widths[0]),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        ]
        for i, width in enumerate(widths):
            before, stride = (widths[max(i - 1, 0)], 1 if i == 0 else 2)
            stages.append(nn.Sequential(_Block(before, width, stride), _Block(width, width, 1)))
        self.backbone = nn.Sequential(*stages)
        self.pool = _Pool(widths[-1], config.keypoints)
        self.out = nn.Linear(2 * config.keypoints, 2 * config.keypoints)

    def forward(self, images: Float[Tensor, "N 3 height width"]) -> Float[Tensor, "N features"]:
        """``images`` in [0, 1]."""
        config = self.config
        x = standardize_colors(images, config.image_mean, config.image_std)
        if config.crop is not None:
            top, left = (round((size - config.crop) / 2) for size in x.shape[2:])
            x = x[..., top : top + config.crop, left : left + config.crop]
        return torch.relu(self.out(self.pool(self.backbone(x))))
