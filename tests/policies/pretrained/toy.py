"""The published architectures at the smallest widths, for tests of what every policy must do."""

from dataclasses import replace
from typing import Any

from policies.denoising.kernels import DDIMConfig, DDPMConfig, FlowODEConfig
from policies.denoising.objectives import DiffusionConfig
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.diffusion_policy.config import DiffusionPolicyConfig, DiffusionTransformerConfig, UNetConfig
from policies.pretrained.flow_policy import FlowVLAConfig
from policies.pretrained.openvla.config import OpenVLAConfig
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.smolvla.config import SmolVLAConfig
from policies.pretrained.vision import VisionConfig


def toy_decoder(width: int, family: Any = "gemma") -> DecoderConfig:
    return DecoderConfig(width=width, mlp_width=2 * width, depth=2, heads=2, kv_heads=1, head_dim=8, family=family)


VISION = VisionConfig(width=16, mlp_width=32, depth=2, heads=2, image_size=28)
SIZES: dict[str, Any] = {
    "action_horizon": 8,
    "chunk_size": 12,  # of which eight are executed
    "padded_dim": 8,
    "vocabulary": 260,
    "vision": VISION,
    "act": FlowODEConfig(steps=3),
}
PI0 = Pi0Config(language=toy_decoder(32), expert=toy_decoder(16), **SIZES)
FLOW_POLICIES: dict[str, FlowVLAConfig] = {
    "pi0": PI0,
    "pi05": replace(PI0, version="pi05", prompt="instruction_and_state"),
    "smolvla": SmolVLAConfig(language=toy_decoder(32, "llama"), expert=toy_decoder(16, "llama"), shuffle=2, **SIZES),
}


def toy(name: str, explore: Any) -> FlowVLAConfig:
    return replace(FLOW_POLICIES[name], explore=explore)


OPENVLA = OpenVLAConfig(
    vocabulary=600,
    action_vocabulary=520,
    dino=VISION,
    siglip=VISION,
    language=toy_decoder(32, "llama"),
    prompt_tokens=48,
)
OPENVLA_OFT = replace(OPENVLA, decoding="parallel", action_horizon=8)

DIFFUSION_POLICY = DiffusionPolicyConfig(
    image_widths=(16, 16),
    keypoints=4,
    objective=DiffusionConfig(levels=20),
    network=UNetConfig(widths=(16, 32), kernel_size=3, groups=4, time_width=16),
    act=DDIMConfig(steps=4, train_last=1),
    explore=DDIMConfig(steps=4, eta=1.0, train_last=3),
)
DIFFUSION_TRANSFORMER = replace(
    DIFFUSION_POLICY,
    network=DiffusionTransformerConfig(width=16, depth=1, heads=2),
    explore=DDPMConfig(steps=4, train_last=4),
)
