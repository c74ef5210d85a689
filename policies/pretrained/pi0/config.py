"""Sizes and versions of pi0 and pi0.5; the defaults are the published ones."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.flow_policy import FlowVLAConfig
from policies.pretrained.vision import VisionConfig
from sims.numbers.ranges import PositiveInt

GEMMA_2B = DecoderConfig(width=2048, mlp_width=16384, depth=18, heads=8, kv_heads=1, head_dim=256)
GEMMA_300M = DecoderConfig(width=1024, mlp_width=4096, depth=18, heads=8, kv_heads=1, head_dim=256)


@dataclass(frozen=True, kw_only=True)
class Pi0Config(FlowVLAConfig):
    """The defaults are the published size. Full-size weights need about 13 GB in float32.

    ``version``: pi0 has the state as a token of the expert; pi05 conditions the expert's norms on time. ``prompt``:
    the instruction alone, or with the state in 256 bins. ``antialias``: how images are scaled
    (policies/pretrained/images.py).
    """

    name: Literal["pi0"] = "pi0"
    version: Literal["pi0", "pi05"] = "pi0"
    prompt: Literal["instruction", "instruction_and_state"] = "instruction"
    vocabulary: PositiveInt = 257_152
    antialias: bool = True
    vision: VisionConfig = field(default_factory=VisionConfig)
    language: DecoderConfig = GEMMA_2B
    expert: DecoderConfig = GEMMA_300M

    @property
    def adaptive(self) -> bool:
        return self.version == "pi05"
