"""Conventions of robots and images against numbers computed as the references do."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from policies.pretrained.convention import Convention, center_crop
from policies.pretrained.images import resize_bicubic, resize_with_pad
from policies.registry import build_policy
from sims.errors import UserError
from tests.policies.pretrained.toy import DIFFUSION_POLICY, OPENVLA, PI0
from tests.policies.test_every_policy import ROBOT, observe

RANDOM = np.random.RandomState(0)
IMAGES = torch.from_numpy(RANDOM.randint(0, 256, (2, 48, 64, 3)).astype(np.uint8))


def test_actions_relative_to_the_state_as_in_openpi() -> None:
    """DeltaActions and AbsoluteActions (transforms.py): the first six elements minus and plus the state's."""
    convention = Convention(relative_actions=6)
    state, action = torch.rand(3, 8) / 4, torch.rand(3, 5, 7) / 4
    expected = action.numpy().copy()
    expected[..., :6] += state.numpy()[:, None, :6]
    np.testing.assert_allclose(convention.to_robot(action, state).numpy(), expected, atol=1e-7)
    torch.testing.assert_close(convention.from_robot(convention.to_robot(action, state), state), action)


def test_the_gripper_of_openvla_in_libero() -> None:
    """2 x - 1, its sign, inverted (openvla, robot_utils.py): 1 is open there, -1 opens in LIBERO."""
    convention = Convention(gripper="zero_to_one_inverted")
    action = torch.zeros(1, 3, 7)
    action[0, :, -1] = torch.tensor([0.0, 0.4, 0.99608])
    assert convention.to_robot(action, torch.zeros(1, 8))[0, :, -1].tolist() == [1.0, 1.0, -1.0]
    robot = torch.zeros(1, 2, 7)
    robot[0, :, -1] = torch.tensor([-1.0, 1.0])
    assert convention.from_robot(robot, torch.zeros(1, 8))[0, :, -1].tolist() == [1.0, 0.0]
    assert torch.equal(convention.to_robot(convention.from_robot(robot, torch.zeros(1, 8)), torch.zeros(1, 8)), robot)


def test_cameras_are_chosen_in_order_and_rotated() -> None:
    obs = observe(2)
    two = obs.__class__(
        images=torch.cat([obs.images, 255 - obs.images], dim=1), state=obs.state, instruction=obs.instruction
    )
    seen = Convention(cameras=("wrist", "front"), rotate_images=True).observe(two, ("front", "wrist"))
    assert torch.equal(seen.images[:, 0], (255 - obs.images[:, 0]).flip(1, 2))
    assert torch.equal(seen.images[:, 1], obs.images[:, 0].flip(1, 2))


@pytest.mark.parametrize("config", [PI0, OPENVLA, DIFFUSION_POLICY], ids=lambda config: config.name)
def test_a_camera_that_the_robot_does_not_have_is_refused(config: Any) -> None:
    with pytest.raises(UserError, match="needs a camera, and the robot or simulator has none"):
        build_policy(config, replace(ROBOT, cameras=()))
    with pytest.raises(UserError, match=r"convention.cameras: the robot has no camera 'nope'; it has front"):
        build_policy(replace(config, convention=Convention(cameras=("front", "nope"))), ROBOT)


@pytest.mark.parametrize("config", [PI0, OPENVLA, DIFFUSION_POLICY], ids=lambda config: config.name)
def test_more_relative_actions_than_the_robot_has_are_refused(config: Any) -> None:
    """Of the robot's action dimensions or of its state's, whichever are fewer."""
    for robot, most in ((ROBOT, 3), (replace(ROBOT, state_dim=2), 2)):
        build_policy(replace(config, convention=Convention(relative_actions=most)), robot)
        with pytest.raises(UserError, match=rf"relative_actions must be at most {most}, .* got {most + 1}"):
            build_policy(replace(config, convention=Convention(relative_actions=most + 1)), robot)


def test_scales_of_changed_actions_are_not_measured() -> None:
    with pytest.raises(UserError, match="scales are the checkpoint's"):
        Convention(relative_actions=6).refuse_fitting()
    Convention(rotate_images=True).refuse_fitting()


def crop_and_resize(image: np.ndarray, area: float) -> np.ndarray:
    """OpenVLA's center crop (openvla_utils.py): TensorFlow's crop_and_resize of the box with this share of the area,
    whose corners are the corners of the result, and its convert_image_dtype, which cuts off at (255 + 0.5) / 255."""
    x, side = image / 255, area**0.5
    for axis in (0, 1):
        size = x.shape[axis]
        at = ((1 - side) / 2) * (size - 1) + np.arange(size) * side * (size - 1) / (size - 1)
        low, high = np.floor(at).astype(int), np.ceil(at).astype(int)
        share = np.expand_dims(at - low, tuple(one for one in range(3) if one != axis))
        x = x.take(low, axis) * (1 - share) + x.take(high, axis) * share
    return np.asarray((x * 255.5).clip(0, 255).astype(np.uint8))


@pytest.mark.parametrize("area", [0.9, 0.5])
def test_the_crop_is_openvlas(area: float) -> None:
    for image, ours in zip(IMAGES, center_crop(IMAGES, area), strict=True):
        difference = np.abs(ours.numpy().astype(int) - crop_and_resize(image.numpy(), area))
        assert difference.max() <= 1 and difference.mean() < 0.001  # float32 beside float64, at a whole number
    assert torch.equal(center_crop(IMAGES, 1.0), IMAGES)


def test_the_crop_keeps_nine_tenths_of_the_area() -> None:
    image = torch.zeros(100, 100, 3, dtype=torch.uint8)
    image[3:97, 3:97] = 200  # the crop's side is 94.9, so nearly nothing else is left
    cropped = center_crop(image, 0.9)
    assert cropped.shape == image.shape and (cropped[2:98, 2:98] > 150).all()
    assert torch.equal(center_crop(image, 1.0), image)


def test_the_crop_leaves_even_images_as_they_are() -> None:
    for level in (0, 1, 100, 254, 255):
        even = torch.full((30, 40, 3), level, dtype=torch.uint8)
        assert torch.equal(center_crop(even, 0.9), even)


def test_openpis_clients_scale_as_pil() -> None:
    """image_tools.resize_with_pad: bilinear, aspect kept, centered on black."""
    for image, ours in zip(IMAGES, resize_with_pad(IMAGES, 28, padding="center", antialias=True), strict=True):
        scaled = Image.fromarray(image.numpy()).resize((28, 21), Image.Resampling.BILINEAR)
        expected = np.zeros((28, 28, 3), np.uint8)
        expected[3:24] = np.asarray(scaled)
        difference = ((ours.movedim(0, -1).numpy() + 1) * 127.5) - expected
        assert np.abs(difference).max() <= 1.01  # one level: torch and PIL round differently


def test_lerobot_scales_without_antialiasing_and_smolvla_pads_left_and_top() -> None:
    x = IMAGES.movedim(-1, 1).float() / 255
    scaled = torch.nn.functional.interpolate(x, size=(21, 28), mode="bilinear", align_corners=False)
    centered = torch.nn.functional.pad(scaled, (0, 0, 3, 4)) * 2 - 1
    low = torch.nn.functional.pad(scaled, (0, 0, 7, 0)) * 2 - 1
    torch.testing.assert_close(resize_with_pad(IMAGES, 28, padding="center", antialias=False), centered)
    torch.testing.assert_close(resize_with_pad(IMAGES, 28, padding="left_top", antialias=False), low)


def test_openvla_stretches_by_pils_bicubic_filter() -> None:
    expected = np.asarray(Image.fromarray(IMAGES[0].numpy()).resize((28, 28), Image.Resampling.BICUBIC))
    ours = resize_bicubic(IMAGES, 28)[0].movedim(0, -1).numpy() * 255
    assert np.abs(ours - expected).max() <= 2.01  # PIL rounds after each of its two passes
