"""Untrained policies that are small enough for tests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from episodes.files import write_atomically
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec

ROBOT = RobotSpec(action_dim=4, state_dim=5, cameras=("agent",), image_size=(32, 32), control_hz=20.0)
ENCODER = CompactEncoderConfig(width=32, image_widths=(8,), text_width=16)


def small_policy(*, robot: RobotSpec = ROBOT, seed: int = 0, action_patch: int = 8, **config: Any) -> DenoisingPolicy:
    """``config``: of DenoisingPolicyConfig."""
    torch.manual_seed(seed)
    expert = ActionExpertConfig(depth=1, action_patch=action_patch)
    return DenoisingPolicy(DenoisingPolicyConfig(encoder=ENCODER, expert=expert, **config), robot)


def change_settings(bundle: Path, denoising_steps: int) -> None:
    """The weights stay."""
    manifest = json.loads((bundle / "bundle.json").read_text())
    manifest["config"]["act"]["steps"] = denoising_steps
    write_atomically(bundle / "bundle.json", json.dumps(manifest).encode())


def other_robot(**changes: Any) -> RobotSpec:
    return replace(ROBOT, **changes)
