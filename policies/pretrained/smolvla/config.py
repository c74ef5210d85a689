"""Sizes of SmolVLA; the defaults are the published ones (lerobot/smolvla_base)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.flow_policy import FlowVLAConfig
from policies.pretrained.vision import VisionConfig
from sims.numbers.ranges import PositiveInt, Width

SIGLIP_B = VisionConfig(width=768, mlp_width=3072, depth=12, heads=12, image_size=512, patch_size=16)
_HEADS: dict[str, int] = {"depth": 16, "heads": 15, "kv_heads": 5, "head_dim": 64}
SMOLLM2 = DecoderConfig(width=960, mlp_width=2560, family="llama", norm_eps=1e-5, **_HEADS)
EXPERT = DecoderConfig(width=720, mlp_width=2048, family="llama", norm_eps=1e-5, **_HEADS)


@dataclass(frozen=True, kw_only=True)
class SmolVLAConfig(FlowVLAConfig):
    """``shuffle``: a square of so many patches becomes one token."""

    name: Literal["smolvla"] = "smolvla"
    vocabulary: PositiveInt = 49_280
    shuffle: Width = 4
    vision: VisionConfig = field(default_factory=lambda: SIGLIP_B)
    language: DecoderConfig = SMOLLM2
    expert: DecoderConfig = EXPERT

    def __post_init__(self) -> None:
        super().__post_init__()
        side = self.vision.image_size // self.vision.patch_size
        if side % self.shuffle:
            raise ValueError(f"policy.shuffle must divide the {side} patches of an image's side, got {self.shuffle}")
