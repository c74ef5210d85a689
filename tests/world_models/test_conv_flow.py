"""The convolutional world model: its contract, then that it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from policies.denoising.policy import RobotSpec
from tests import dot_world
from world_models.bundle import load_world, save_world
from world_models.data.clips import ClipSampler
from world_models.models.conv_flow import ConvFlow, ConvFlowConfig, _cells, _places, _warp
from world_models.training.fit import FitConfig, Fitter, check_clips, first_moment, fit_kinematics
from world_models.world_model import WorldModelError

H = dot_world.HORIZON


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler([dot_world.store(tmp_path_factory.mktemp("dots") / "store")], action_horizon=H)


def untrained(clips: ClipSampler, **changes: object) -> ConvFlow:
    torch.manual_seed(0)
    world = ConvFlow(ConvFlowConfig(**{**vars(dot_world.WORLD), **changes}), dot_world.ROBOT)  # type: ignore[arg-type]
    world.fit_scales(*clips.statistics())
    return world.eval()


def test_decoding_inverts_encoding(clips: ClipSampler) -> None:
    world = untrained(clips)
    frames = clips.draw(np.random.default_rng(0), 4, 1).frames
    latent = world.encode(frames)
    assert latent.shape == (4, 2, *world.latent_shape)
    assert torch.equal(world.decode(latent), frames)


def test_untrained_it_nearly_repeats_the_last_frame(clips: ClipSampler) -> None:
    world = untrained(clips)
    clip = clips.draw(np.random.default_rng(0), 8, 1)
    noise = world.noise(8, torch.Generator().manual_seed(0))
    moment = first_moment(world, clip)
    imagined = world.sample_chunk(world.prefill(moment), clip.action[:, 0], clip.length[:, 0], noise)
    assert (imagined.latent - moment.current).abs().mean() < 0.05
    torch.testing.assert_close(imagined.state, moment.state)


def test_same_noise_same_future_and_later_actions_are_not_read(clips: ClipSampler) -> None:
    world = shaken(untrained(clips, steps=2))
    clip = clips.draw(np.random.default_rng(1), 6, 1)
    noise = world.noise(6, torch.Generator().manual_seed(0))
    memory, length = world.prefill(first_moment(world, clip)), torch.tensor([1, 2, 3, 1, 2, 3])
    action = clip.action[:, 0].clone()
    first = world.sample_chunk(memory, action, length, noise)
    for row, taken in enumerate(length.tolist()):
        action[row, taken:] = 0.77
    again = world.sample_chunk(memory, action, length, noise)
    assert torch.equal(first.latent, again.latent)
    assert torch.equal(first.state, again.state)
    action[:, 0] += 0.5
    assert not torch.equal(world.sample_chunk(memory, action, length, noise).latent, first.latent)
    other = world.sample_chunk(memory, action, length, world.noise(6, torch.Generator().manual_seed(1)))
    assert not torch.equal(other.latent, first.latent)


def test_the_baseline_does_not_see_actions(clips: ClipSampler) -> None:
    world = shaken(untrained(clips, actions=False))
    clip = clips.draw(np.random.default_rng(1), 4, 1)
    noise, memory = world.noise(4, torch.Generator().manual_seed(0)), world.prefill(first_moment(world, clip))
    length = torch.full((4,), H)
    one = world.sample_chunk(memory, clip.action[:, 0], length, noise)
    other = world.sample_chunk(memory, -clip.action[:, 0], length, noise)
    assert torch.equal(one.latent, other.latent)


def test_warping_moves_pixels_and_repeats_edges() -> None:
    """By one pixel to the left: every pixel shows its right neighbor."""
    frame, matrix = torch.arange(25.0).view(1, 1, 5, 5), torch.eye(3)[None].clone()
    matrix[:, 0, 2] = 0.5  # pixels lie half a unit apart
    moved = _warp(frame, matrix, _places(5, 5))
    torch.testing.assert_close(moved[0, 0, :, :4], frame[0, 0, :, 1:])
    torch.testing.assert_close(moved[0, 0, :, 4], frame[0, 0, :, 4])


def test_warping_sees_depth() -> None:
    """x / (1 + y): where y is 1, everything lies half as far from the middle."""
    frame, matrix = torch.arange(25.0).view(1, 1, 5, 5), torch.eye(3)[None].clone()
    matrix[:, 2, 1] = 1.0
    moved = _warp(frame, matrix, _places(5, 5))
    torch.testing.assert_close(moved[0, 0, 4, 4], frame[0, 0, 3, 3])
    torch.testing.assert_close(moved[0, 0, 2], frame[0, 0, 2])


def test_layers_lie_still_where_the_robot_does(clips: ClipSampler) -> None:
    """Whatever was learned: back at the first state, every layer of the first frame is where it was."""
    world = shaken(untrained(clips))
    moment = first_moment(world, clips.draw(np.random.default_rng(0), 4, 1))
    state, first = (world.normalizer.normalize_state(state) for state in (moment.state, moment.first_state))
    layers = world._seen(moment, first - state)[world.sources // 2 + 1 :]
    assert len(layers) == world.config.layers
    for layer in layers:
        torch.testing.assert_close(layer, _cells(moment.first.flatten(0, 1)), atol=1e-3, rtol=0)


def test_kinematics_need_no_pictures(clips: ClipSampler) -> None:
    """The dot's state, exact to a few hundredths of what it moves, and nothing of the fit moves it afterwards."""
    world = untrained(clips)
    fit_kinematics(world, clips, seed=0, steps=300)
    clip = clips.draw(np.random.default_rng(5), 64, 1)
    moment, action, length = first_moment(world, clip), clip.action[:, 0], clip.length[:, 0]
    imagined = world.sample_chunk(world.prefill(moment), action, length, world.noise(64, torch.Generator()))
    gone, missed = ((clip.state[:, 1] - end).abs().mean() for end in (clip.state[:, 0], imagined.state))
    assert missed < 0.15 * gone
    before = {name: value.clone() for name, value in world.kinematics.state_dict().items()}
    Fitter(world, FitConfig(steps=1, batch_size=2), clips, seed=0).update()
    for name, value in world.kinematics.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_it_learns_where_the_dot_goes(clips: ClipSampler) -> None:
    """After some seconds: the state by action alone, the picture better than a copy of the last one, open loop."""
    world = untrained(clips)
    fitter = Fitter(world, FitConfig(steps=150, batch_size=16, learning_rate=3e-3, warmup=20), clips, seed=0)
    for _ in range(150):
        metrics = fitter.update()
    assert np.isfinite(metrics["loss"])
    clip = clips.draw_near_ends(np.random.default_rng(9), 64, 2, within=14)
    moment, generator = first_moment(world, clip), torch.Generator().manual_seed(0)
    for i in range(2):
        imagined = world.sample_chunk(
            world.prefill(moment), clip.action[:, i], clip.length[:, i], world.noise(64, generator)
        )
        moment = moment.advance(imagined.latent, imagined.state, clip.action[:, i], clip.length[:, i])
    there = clip.length[:, 1] > 0
    truth, start = world.encode(clip.frames[:, 2])[there], world.encode(clip.frames[:, 0])[there]
    assert (imagined.latent[there] - truth).square().mean() < 0.5 * (start - truth).square().mean()
    gone = (clip.state[:, 2] - clip.state[:, 0])[there, 0].abs()
    missed = (imagined.state - clip.state[:, 2])[there, 0].abs()
    assert missed.mean() < 0.3 * gone.mean()
    assert (imagined.error > 0).all()


def test_rows_go_on_from_what_the_model_saw(clips: ClipSampler) -> None:
    """Until their episode ends, and not before ``roll_in_from``; else each is a recorded moment."""
    config = FitConfig(steps=8, batch_size=16, warmup=2, go_on=0.999, roll_in_from=0.25)
    fitter = Fitter(untrained(clips), config, clips, seed=1)
    went_on = 0
    for step in range(8):
        led, expected = fitter._number.numpy().copy(), fitter._moment
        clip = fitter.draw()
        goes_on = fitter._goes_on.numpy()
        assert goes_on.any() == (step >= 2)
        assert not goes_on[~clips.has_next(led)].any()
        assert np.array_equal(clip.number[:, 0].numpy()[goes_on], led[goes_on])
        fitter.step = step + 1
        fitter.loss(clip)
        assert fitter._moment is not None
        if goes_on.any():
            assert expected is not None
            row = int(np.flatnonzero(goes_on)[0])
            assert torch.equal(fitter._moment.previous[row], expected.current[row])  # not the recorded picture
        went_on += int(goes_on.sum())
    assert went_on > 8


def test_a_resumed_fit_is_the_same_fit(clips: ClipSampler) -> None:
    config = FitConfig(steps=6, batch_size=4, warmup=2)
    whole = Fitter(untrained(clips), config, clips, seed=3)
    for _ in range(6):
        whole.update()
    first = Fitter(untrained(clips), config, clips, seed=3)
    for _ in range(3):
        first.update()
    state = first.state_dict()
    second = Fitter(untrained(clips), config, clips, seed=99)
    second.load_state_dict(state)
    for _ in range(3):
        second.update()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_a_wrong_robot_is_refused_in_one_line(clips: ClipSampler) -> None:
    robot = RobotSpec(action_dim=7, state_dim=2, cameras=("front", "flipped"), image_size=(16, 16), control_hz=10.0)
    with pytest.raises(WorldModelError, match="action dimensions 2, the world model was made for 7"):
        check_clips(ConvFlow(dot_world.WORLD, robot), clips)
    with pytest.raises(WorldModelError, match="multiples of 8"):
        ConvFlow(
            dot_world.WORLD, RobotSpec(action_dim=7, state_dim=2, cameras=("a",), image_size=(20, 16), control_hz=10.0)
        )


def shaken(world: ConvFlow) -> ConvFlow:
    """Its zero-initialized layers at random, so that every input matters."""
    generator = torch.Generator().manual_seed(0)
    for parameter in world.parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.05, generator=generator)
    return world


def test_a_model_survives_the_disk(clips: ClipSampler, tmp_path: Path) -> None:
    world, outcome = dot_world.models()
    path = tmp_path / "world.safetensors"
    save_world(shaken(world), outcome, path, usual_error=0.25, metrics={"success_auc": 0.9})
    loaded = load_world(path)
    assert loaded.info.usual_error == 0.25
    for name, value in world.state_dict().items():
        assert torch.equal(value, loaded.world.state_dict()[name]), name
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(WorldModelError, match="truncated or not a world model"):
        load_world(path)
    with pytest.raises(WorldModelError, match="fit one with: vla-rl world-model fit"):
        load_world(tmp_path / "nothing")
