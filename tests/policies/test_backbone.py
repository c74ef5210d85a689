"""A backbone is written to a file and read back, and only into a policy that it fits."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from policies.backbone import BackboneError, load_backbone, save_backbone
from policies.bundle import load_bundle, save_bundle
from policies.compact_encoder import CompactEncoderConfig
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from sims.vector_env import Observation, encode_instructions
from tests.policies.encoding import encode

ROBOT = RobotSpec(action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(32, 32), control_hz=20.0)
ENCODER = CompactEncoderConfig(width=32, text_width=32, image_widths=(8,), landmarks=5)


def make_policy(encoder: CompactEncoderConfig = ENCODER, *, seed: int = 0, depth: int = 1) -> DenoisingPolicy:
    torch.manual_seed(seed)
    return DenoisingPolicy(DenoisingPolicyConfig(encoder=encoder, expert=ActionExpertConfig(depth=depth)), ROBOT)


def observations() -> Observation:
    generator = torch.Generator().manual_seed(0)
    return Observation(
        images=torch.randint(256, (3, 2, 32, 32, 3), dtype=torch.uint8, generator=generator),
        state=torch.randn(3, 8, generator=generator),
        instruction=encode_instructions(["a b", "c", ""]),
    )


def test_a_loaded_backbone_encodes_alike_also_in_a_bundle_without_the_file(tmp_path: Path) -> None:
    teacher, path = make_policy(), tmp_path / "weights.safetensors"
    teacher.fit_normalizer(torch.randn(50, 8) * 2 + 1, torch.randn(50, 7))
    save_backbone(teacher, path, notes={"updates": 1})
    student = make_policy(replace(ENCODER, forecast_dims=2), seed=1, depth=2)
    load_backbone(student, str(path))
    student.fit_normalizer(torch.randn(50, 8), torch.randn(50, 7))  # behavior cloning keeps the scale of states
    expected = encode(teacher, observations()).encoding.pooled
    found = encode(student, observations()).encoding.pooled
    torch.testing.assert_close(found, expected, atol=0.02, rtol=0.02)
    torch.testing.assert_close(student.normalizer.state_mean, teacher.normalizer.state_mean, atol=1e-3, rtol=1e-3)
    save_bundle(student, tmp_path / "bundle")
    path.unlink()
    assert torch.equal(encode(load_bundle(tmp_path / "bundle"), observations()).encoding.pooled, found)


def test_landmarks_are_the_end_of_the_pooled_encoding() -> None:
    policy = make_policy()
    encoding = encode(policy, observations()).encoding
    head = policy.encoder.landmark_head
    assert head is not None
    landmarks = policy.encoder.landmarks(encoding)
    assert landmarks.shape == (3, 5)
    torch.testing.assert_close(landmarks, head(encoding.pooled[:, :-5]))


def test_another_shape_is_an_error_that_names_the_setting(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    save_backbone(make_policy(), path, notes={})
    with pytest.raises(BackboneError, match=r"encoder.text_width is 64, the backbone has 32"):
        load_backbone(make_policy(replace(ENCODER, text_width=64)), str(path))


def test_a_missing_or_damaged_file_and_a_policy_without_an_encoder_are_errors(tmp_path: Path) -> None:
    with pytest.raises(BackboneError, match="the package has: tabletop"):
        load_backbone(make_policy(), "nowhere")
    path = tmp_path / "weights.safetensors"
    save_backbone(make_policy(), path, notes={})
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(BackboneError, match="checksum"):
        load_backbone(make_policy(), str(path))
    with pytest.raises(BackboneError, match="gaussian has no compact encoder"):
        load_backbone(GaussianPolicy(GaussianPolicyConfig(), ROBOT), "tabletop")


def test_the_shipped_backbone_fits_the_settings_that_are_recommended() -> None:
    robot = replace(ROBOT, image_size=(64, 64))
    config = DenoisingPolicyConfig(encoder=CompactEncoderConfig(width=128, landmarks=32, forecast_dims=3))
    policy = DenoisingPolicy(config, robot)
    load_backbone(policy, "tabletop")
    assert policy.normalizer.state_fixed
