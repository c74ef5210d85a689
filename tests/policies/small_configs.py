"""Every registered policy at a size for tests: eight actions per chunk."""

from typing import Any

from policies.categorical import CategoricalPolicyConfig
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.kernels import FlowNoiseConfig, FlowSDEConfig
from policies.denoising.policy import DenoisingPolicyConfig
from policies.gaussian import GaussianPolicyConfig
from tests.policies.pretrained.toy import DIFFUSION_POLICY, DIFFUSION_TRANSFORMER, OPENVLA_OFT, toy

ENCODER = CompactEncoderConfig(image_widths=(16,), width=32, text_width=16)
CONFIGS: dict[str, Any] = {
    "denoising": DenoisingPolicyConfig(encoder=ENCODER, expert=ActionExpertConfig(time_width=16, depth=1)),
    "categorical": CategoricalPolicyConfig(encoder=ENCODER, bins=16, depth=1, temperature=1.6),
    "gaussian": GaussianPolicyConfig(action_horizon=8, hidden=(32,)),
    "pi0": toy("pi0", FlowSDEConfig(steps=3)),
    "pi05": toy("pi05", FlowNoiseConfig(steps=3)),
    "diffusion_policy": DIFFUSION_POLICY,
    "diffusion_transformer": DIFFUSION_TRANSFORMER,
    "openvla": OPENVLA_OFT,
    "smolvla": toy("smolvla", FlowSDEConfig(steps=3)),
}
