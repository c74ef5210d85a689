"""pi0 and pi0.5 at the width of the golden files."""

from typing import Any, Literal

from policies.denoising.kernels import FlowODEConfig
from policies.policy import RobotSpec
from policies.pretrained.decoder import DecoderConfig
from policies.pretrained.pi0.config import Pi0Config
from policies.pretrained.vision import VisionConfig

ROBOT = RobotSpec(action_dim=7, state_dim=8, cameras=("front", "wrist"), image_size=(28, 28), control_hz=20.0)


def decoder(width: int) -> DecoderConfig:
    return DecoderConfig(width=width, mlp_width=128, depth=4, heads=8, kv_heads=1, head_dim=16)


def tiny_pi0(version: Literal["pi0", "pi05"] = "pi0", **changes: Any) -> Pi0Config:
    return Pi0Config(
        version=version,
        action_horizon=5,
        chunk_size=10,
        prompt_tokens=12,
        vocabulary=512,
        vision=VisionConfig(width=32, mlp_width=64, depth=2, heads=2, image_size=28),
        language=decoder(128),
        expert=decoder(64),
        act=FlowODEConfig(steps=10),
        **changes,
    )
