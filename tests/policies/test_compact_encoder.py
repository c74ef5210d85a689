"""The compact encoder: what it distinguishes, and the sizes that its settings span."""

import dataclasses

import pytest
import torch

from policies.compact_encoder import CompactEncoder, CompactEncoderConfig, Forecast, TextEncoder
from policies.denoising.action_expert import ActionExpertConfig
from policies.denoising.policy import DenoisingPolicy, DenoisingPolicyConfig
from policies.policy import RobotSpec
from sims.errors import UserError
from sims.vector_env import Observation, encode_instructions

LARGE = DenoisingPolicyConfig(
    action_horizon=16,
    encoder=CompactEncoderConfig(
        image_widths=(96, 192, 384),
        image_depths=(2, 2, 6),
        queries=8,
        query_heads=4,
        text_width=256,
        text_depth=4,
        text_heads=8,
        width=640,
    ),
    expert=ActionExpertConfig(depth=8, heads=8, time_width=256, action_patch=1),
)


def count(config, cameras=2):
    names = tuple(f"camera{i}" for i in range(cameras))
    robot = RobotSpec(action_dim=7, state_dim=10, cameras=names, image_size=(64, 64), control_hz=20.0)
    with torch.device("meta"):
        policy = DenoisingPolicy(config, robot)
    return sum(parameter.numel() for parameter in policy.parameters())


def test_sizes_from_one_config_class():
    assert 0.8e6 < count(DenoisingPolicyConfig()) < 2e6
    assert 80e6 < count(LARGE) < 200e6


def test_words_are_read_by_letters_and_order():
    torch.manual_seed(0)
    encoder = TextEncoder(width=16, depth=1, heads=2)
    texts = ["red on blue", "blue on red", "red  on blue ", "der on blue", "red on blue"]
    words = encoder(encode_instructions(texts))
    tokens, exists = words.tokens, words.exists
    assert exists.sum(1).tolist() == [3, 3, 3, 3, 3]
    assert torch.allclose(tokens[0], tokens[2], atol=1e-6)
    assert torch.equal(tokens[0], tokens[4])
    for other in (1, 3):
        assert not torch.allclose(tokens[0, :3], tokens[other, :3], atol=1e-2)


def test_what_the_state_has_not_cannot_be_forecast():
    with pytest.raises(UserError, match=r"forecast_dims must be within 1..2, the state's dimensions, got 3"):
        Forecast(CompactEncoderConfig(forecast_dims=3), pooled_width=8, state_dim=2)


def test_longest_instruction_and_none_at_all():
    torch.manual_seed(0)
    network = CompactEncoder(CompactEncoderConfig(), cameras=1, image_size=(64, 64), state_dim=2)
    obs = Observation(
        images=torch.zeros(3, 1, 64, 64, 3, dtype=torch.uint8),
        state=torch.zeros(3, 2),
        instruction=encode_instructions(["a " * 48, "", "x" * 96]),
    )
    context = network(obs, obs.state)
    assert torch.isfinite(context.tokens).all()
    context.tokens.sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in network.parameters() if p.grad is not None)
    assert not torch.equal(context.pooled[0], context.pooled[1])


def test_the_instruction_steers_what_is_seen():
    torch.manual_seed(0)
    network = CompactEncoder(CompactEncoderConfig(), cameras=1, image_size=(64, 64), state_dim=2)
    image = torch.randint(0, 256, (1, 1, 64, 64, 3), dtype=torch.uint8).expand(2, -1, -1, -1, -1)
    obs = Observation(
        images=image, state=torch.zeros(2, 2), instruction=encode_instructions(["the red block", "the blue block"])
    )
    camera = network(obs, obs.state).tokens[:, :4]
    assert (camera[0] - camera[1]).abs().max() > 0.1


def test_other_image_sizes_fit():
    config = dataclasses.replace(CompactEncoderConfig(), image_widths=(16, 32), image_depths=(1, 1))
    network = CompactEncoder(config, cameras=1, image_size=(96, 128), state_dim=2)
    obs = Observation(
        images=torch.zeros(1, 1, 96, 128, 3, dtype=torch.uint8),
        state=torch.zeros(1, 2),
        instruction=encode_instructions(["go"]),
    )
    assert network(obs, obs.state).tokens.shape == (1, 6, 192)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image_depths": (1, 1)}, "one entry per stage"),
        ({"text_width": 30}, "multiple of text_heads"),
    ],
)
def test_wrong_sizes_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CompactEncoderConfig(), **change)


@pytest.mark.parametrize(
    ("size", "fitting"),
    [((63, 95), "height 32 or 64 and width 64 or 96"), ((64, 84), "height 64 and width 64 or 96")],
)
def test_images_of_which_a_part_would_not_be_seen_are_refused(size, fitting):
    config = CompactEncoderConfig(image_patch=8, image_widths=(16, 32, 64), image_depths=(1, 1, 1))
    with pytest.raises(
        UserError, match=rf"needs multiples of 32, .*: give images of {fitting}, or another image_patch"
    ):
        CompactEncoder(config, cameras=1, image_size=size, state_dim=2)


def test_images_that_are_too_small_are_refused():
    """Of the smallest that fit the last map is one cell."""
    config = dataclasses.replace(CompactEncoderConfig(), image_widths=(16, 32), image_depths=(1, 1))
    with pytest.raises(UserError, match=r"7x64 pixels.*at least 8x8"):
        CompactEncoder(config, cameras=1, image_size=(7, 64), state_dim=2)
    CompactEncoder(config, cameras=0, image_size=(1, 1), state_dim=2)
    network = CompactEncoder(config, cameras=1, image_size=(8, 8), state_dim=2)
    obs = Observation(
        images=torch.zeros(1, 1, 8, 8, 3, dtype=torch.uint8),
        state=torch.zeros(1, 2),
        instruction=encode_instructions(["reach"]),
    )
    assert network(obs, obs.state).pooled.isfinite().all()
