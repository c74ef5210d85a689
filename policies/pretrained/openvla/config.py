"""Sizes and heads of OpenVLA and OpenVLA-OFT; the defaults are those of the published 7 B model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from policies.device import Precision
from policies.pretrained.convention import Convention
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.lora import LoRAConfig
from policies.pretrained.storage import StorageConfig
from policies.pretrained.vision import VisionConfig
from sims.numbers.ranges import PositiveFloat, PositiveInt, Width

# One block fewer than the models have: features are the output of the second-last block.
DINOV2_L = VisionConfig(width=1024, mlp_width=4096, depth=23, heads=16)
SIGLIP_SO400M = VisionConfig(width=1152, mlp_width=4304, depth=26, heads=16)
LLAMA2_7B = DecoderConfig(
    width=4096, mlp_width=11008, depth=32, heads=32, kv_heads=32, head_dim=128, family="llama", norm_eps=1e-6
)
BINS = 256


@dataclass(frozen=True, kw_only=True)
class OpenVLAConfig:
    """``decoding`` autoregressive: one action, token by token (OpenVLA); parallel: the whole chunk in one pass in which
    every token sees every other (OFT). ``head``: 256 tokens per element, which reinforcement learning trains,
    or l1, a regression without density (OFT's; parallel alone). ``temperature``: of exploration; deployment takes the
    most likely token. ``stop_token``: whether one follows the placeholders (RLinf leaves it out). ``proprio``: whether
    the state is a token behind the images. ``prompt_tokens``: prompts are padded to this length, longer ones cut.
    ``action_vocabulary``: number of the last token of an action, plus 1. ``checkpointing``: layers are recomputed in
    the backward pass. ``prefix_precision`` bfloat16: all matrices but the head's are stored, and everything but
    log-probs is computed, in bfloat16. ``lora``: of all linear layers but the head. ``storage``: of what a frozen
    network made of observations.
    """

    name: Literal["openvla"] = "openvla"
    action_horizon: Width = 1
    decoding: Literal["autoregressive", "parallel"] = "autoregressive"
    head: Literal["tokens", "l1"] = "tokens"
    temperature: PositiveFloat = 1.6
    stop_token: bool = True
    proprio: bool = False
    prompt_tokens: Width = 64
    vocabulary: PositiveInt = 32_064
    action_vocabulary: PositiveInt = 32_000
    convention: Convention = field(default_factory=Convention)
    dino: VisionConfig = field(default_factory=lambda: DINOV2_L)
    siglip: VisionConfig = field(default_factory=lambda: SIGLIP_SO400M)
    language: DecoderConfig = LLAMA2_7B
    checkpointing: bool = False
    prefix_precision: Precision = "float32"
    lora: LoRAConfig = field(default_factory=LoRAConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)

    def __post_init__(self) -> None:
        if self.decoding == "autoregressive" and (self.action_horizon != 1 or self.head != "tokens"):
            raise ValueError(
                "policy.decoding autoregressive predicts one action in tokens: action_horizon 1 and head tokens, "
                f"got {self.action_horizon} and {self.head}"
            )
        if not BINS <= self.action_vocabulary <= self.vocabulary:
            raise ValueError(
                f"policy.action_vocabulary must be within {BINS}..{self.vocabulary}, got {self.action_vocabulary}"
            )
