"""The convolutional world model: its interface, then that it learns."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from policies.policy import RobotSpec
from tests import dot_episodes
from tests.dot_episodes import finish
from vla_rl.runs.checkpoint import load_tree, save_tree
from world_models.bundle import load_world_model, save_world_model
from world_models.data.clip import first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.models.conv_flow import PATCH, ConvFlow, ConvFlowConfig
from world_models.models.warp import pixel_coordinates, to_cells, warp
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig, check_clips
from world_models.training.kinematics import KinematicsFit
from world_models.world_model import WorldModelError

H = dot_episodes.HORIZON


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler([dot_episodes.store(tmp_path_factory.mktemp("dots") / "store")], action_horizon=H)


def untrained(clips: ClipSampler, **changes: object) -> ConvFlow:
    torch.manual_seed(0)
    world = ConvFlow(ConvFlowConfig(**{**vars(dot_episodes.DYNAMICS), **changes}), dot_episodes.ROBOT)  # type: ignore[arg-type]
    world.fit_scales(*clips.statistics())
    return world.eval()


def test_decoding_inverts_encoding(clips: ClipSampler) -> None:
    world = untrained(clips)
    frames = clips.draw(np.random.default_rng(0), 4, 1).frames
    latent = world.encode(frames)
    assert latent.shape == (4, 2, *world.latent_shape)
    assert torch.equal(world.decode(latent), frames)


def test_an_untrained_model_nearly_repeats_the_current_frame(clips: ClipSampler) -> None:
    world = untrained(clips)
    clip = clips.draw(np.random.default_rng(0), 8, 1)
    noise = world.noise(8, torch.Generator().manual_seed(0))
    history = first_history(world, clip)
    imagined = world.sample_chunk(world.prefill(history), clip.action[:, 0], clip.length[:, 0], noise)
    assert (imagined.latent - history.current).abs().mean() < 0.05
    torch.testing.assert_close(imagined.state, history.state)


def test_predictions_are_deterministic_and_later_actions_are_not_read(clips: ClipSampler) -> None:
    world = randomized(untrained(clips, steps=2))
    clip = clips.draw(np.random.default_rng(1), 6, 1)
    noise = world.noise(6, torch.Generator().manual_seed(0))
    prefill, length = world.prefill(first_history(world, clip)), torch.tensor([1, 2, 3, 1, 2, 3])
    action = clip.action[:, 0].clone()
    first = world.sample_chunk(prefill, action, length, noise)
    for row, taken in enumerate(length.tolist()):
        action[row, taken:] = 0.77
    again = world.sample_chunk(prefill, action, length, noise)
    assert torch.equal(first.latent, again.latent)
    assert torch.equal(first.state, again.state)
    action[:, 0] += 0.5
    assert not torch.equal(world.sample_chunk(prefill, action, length, noise).latent, first.latent)
    other = world.sample_chunk(prefill, action, length, world.noise(6, torch.Generator().manual_seed(1)))
    assert not torch.equal(other.latent, first.latent)


def test_the_baseline_ignores_actions(clips: ClipSampler) -> None:
    world = randomized(untrained(clips, actions=False))
    clip = clips.draw(np.random.default_rng(1), 4, 1)
    noise, prefill = world.noise(4, torch.Generator().manual_seed(0)), world.prefill(first_history(world, clip))
    length = torch.full((4,), H)
    one = world.sample_chunk(prefill, clip.action[:, 0], length, noise)
    other = world.sample_chunk(prefill, -clip.action[:, 0], length, noise)
    assert torch.equal(one.latent, other.latent)


def test_warping_moves_pixels_and_repeats_edges() -> None:
    """By one pixel to the left: every pixel shows its right neighbor."""
    frame, matrix = torch.arange(25.0).view(1, 1, 5, 5), torch.eye(3)[None].clone()
    matrix[:, 0, 2] = 0.5  # pixels are half a unit apart
    moved = warp(frame, matrix, pixel_coordinates(5, 5))
    torch.testing.assert_close(moved[0, 0, :, :4], frame[0, 0, :, 1:])
    torch.testing.assert_close(moved[0, 0, :, 4], frame[0, 0, :, 4])


def test_warping_is_projective() -> None:
    """x / (1 + y): where y is 1, distances to the middle are halved."""
    frame, matrix = torch.arange(25.0).view(1, 1, 5, 5), torch.eye(3)[None].clone()
    matrix[:, 2, 1] = 1.0
    moved = warp(frame, matrix, pixel_coordinates(5, 5))
    torch.testing.assert_close(moved[0, 0, 4, 4], frame[0, 0, 3, 3])
    torch.testing.assert_close(moved[0, 0, 2], frame[0, 0, 2])


def test_layers_do_not_move_where_the_robot_does_not(clips: ClipSampler) -> None:
    """With any weights, every layer of the first frame is unchanged at the first state."""
    world = randomized(untrained(clips))
    history = first_history(world, clips.draw(np.random.default_rng(0), 4, 1))
    state, first = (world.normalizer.normalize_state(state) for state in (history.state, history.first_state))
    layers = world._candidates(history, first - state)[world.sources // 2 + 1 :]
    assert len(layers) == world.config.layers
    for layer in layers:
        torch.testing.assert_close(layer, to_cells(history.first.flatten(0, 1), PATCH), atol=1e-3, rtol=0)


def test_kinematics_are_fitted_without_images(clips: ClipSampler) -> None:
    """The predicted state is accurate, and the fit of the dynamics does not change the kinematics."""
    world = untrained(clips)
    finish(KinematicsFit(world, clips, seed=0, steps=300))
    world.kinematics.requires_grad_(False)
    clip = clips.draw(np.random.default_rng(5), 64, 1)
    history, action, length = first_history(world, clip), clip.action[:, 0], clip.length[:, 0]
    imagined = world.sample_chunk(world.prefill(history), action, length, world.noise(64, torch.Generator()))
    gone, missed = ((clip.state[:, 1] - end).abs().mean() for end in (clip.state[:, 0], imagined.state))
    assert missed < 0.15 * gone
    before = {name: value.clone() for name, value in world.kinematics.state_dict().items()}
    DynamicsFit(world, DynamicsFitConfig(steps=1, batch_size=2), clips, seed=0).update()
    for name, value in world.kinematics.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_kinematics_are_the_same_at_every_denoising_step(clips: ClipSampler) -> None:
    """They are fitted at t = 1; the state is that of the last step, whose t is 1 / steps."""
    world = untrained(clips)
    finish(KinematicsFit(world, clips, seed=0, steps=20))
    clip = clips.draw(np.random.default_rng(5), 16, 1)
    prefill, noise = world.prefill(first_history(world, clip)), world.noise(16, torch.Generator())

    def state(steps: int) -> torch.Tensor:
        world.config = replace(world.config, steps=steps)
        return world.sample_chunk(prefill, clip.action[:, 0], clip.length[:, 0], noise).state

    assert not torch.equal(state(1), clip.state[:, 0])
    assert torch.equal(state(4), state(1))


def test_it_learns_the_motion_of_the_dot(clips: ClipSampler) -> None:
    """After some seconds the state and the image, open loop, are better than a copy's."""
    world = untrained(clips)
    fit = DynamicsFit(world, DynamicsFitConfig(steps=150, batch_size=16, learning_rate=3e-3, warmup=20), clips, seed=0)
    for _ in range(150):
        metrics = fit.update()
    assert np.isfinite(metrics["loss"])
    clip = clips.draw_near_ends(np.random.default_rng(9), 64, 2, within=14)
    history, generator = first_history(world, clip), torch.Generator().manual_seed(0)
    for i in range(2):
        imagined = world.sample_chunk(
            world.prefill(history), clip.action[:, i], clip.length[:, i], world.noise(64, generator)
        )
        history = history.advance(imagined.latent, imagined.state, clip.action[:, i], clip.length[:, i])
    there = clip.length[:, 1] > 0
    truth, start = world.encode(clip.frames[:, 2])[there], world.encode(clip.frames[:, 0])[there]
    assert (imagined.latent[there] - truth).square().mean() < 0.5 * (start - truth).square().mean()
    gone = (clip.state[:, 2] - clip.state[:, 0])[there, 0].abs()
    missed = (imagined.state - clip.state[:, 2])[there, 0].abs()
    assert missed.mean() < 0.3 * gone.mean()
    assert (imagined.error > 0).all()


def test_a_large_motion_has_an_inverse(clips: ClipSampler) -> None:
    """The exponential of a large matrix is singular in float32, and its inverse by elimination fails."""
    world = untrained(clips)
    torch.manual_seed(1)
    with torch.no_grad():
        world.layer_pose[-1].bias.normal_(std=12.0)  # type: ignore[union-attr, operator]
    clip = clips.draw(np.random.default_rng(0), 8, 1)
    noise = world.noise(8, torch.Generator().manual_seed(0))
    imagined = world.sample_chunk(
        world.prefill(first_history(world, clip)), clip.action[:, 0], clip.length[:, 0], noise
    )
    assert imagined.latent.isfinite().all()


def test_roll_in_continues_from_predictions(clips: ClipSampler) -> None:
    """Until the episode ends, and not before ``roll_in_from``; otherwise clips start at recorded observations."""
    config = DynamicsFitConfig(steps=8, batch_size=16, warmup=2, roll_in=0.999, roll_in_from=0.25)
    fit = DynamicsFit(untrained(clips), config, clips, seed=1)
    continued = 0
    for step in range(8):
        reached, expected = fit._reached.numpy().copy(), fit._history
        clip = fit.draw()
        rolls_in = fit._rolls_in.numpy()
        assert rolls_in.any() == (step >= 2)
        assert not rolls_in[~clips.has_next(reached)].any()
        assert np.array_equal(clip.index[:, 0].numpy()[rolls_in], reached[rolls_in])
        fit.step = step + 1
        fit.loss(clip)
        assert fit._history is not None
        if rolls_in.any():
            assert expected is not None
            row = int(np.flatnonzero(rolls_in)[0])
            assert torch.equal(fit._history.previous[row], expected.current[row])  # not the recorded image
        continued += int(rolls_in.sum())
    assert continued > 8


def test_a_resumed_fit_is_the_same_fit(clips: ClipSampler, tmp_path: Path) -> None:
    config = DynamicsFitConfig(steps=6, batch_size=4, warmup=2)
    whole = DynamicsFit(untrained(clips), config, clips, seed=3)
    for _ in range(6):
        whole.update()
    first = DynamicsFit(untrained(clips), config, clips, seed=3)
    for _ in range(3):
        first.update()
    save_tree(tmp_path / "state", first.state_dict())
    second = DynamicsFit(untrained(clips), config, clips, seed=99)
    second.load_state_dict(load_tree(tmp_path / "state"))
    for _ in range(3):
        second.update()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_a_wrong_robot_is_refused(clips: ClipSampler) -> None:
    robot = RobotSpec(action_dim=7, state_dim=2, cameras=("front", "flipped"), image_size=(16, 16), control_hz=10.0)
    with pytest.raises(WorldModelError, match="action dimensions 2, the world model was made for 7"):
        check_clips(ConvFlow(dot_episodes.DYNAMICS, robot), clips)
    with pytest.raises(WorldModelError, match="multiples of 8"):
        ConvFlow(
            dot_episodes.DYNAMICS,
            RobotSpec(action_dim=7, state_dim=2, cameras=("a",), image_size=(20, 16), control_hz=10.0),
        )


def randomized(world: ConvFlow) -> ConvFlow:
    """Zero-initialized layers set to random weights, so that every input matters."""
    generator = torch.Generator().manual_seed(0)
    for parameter in world.parameters():
        if not parameter.any():
            parameter.data.normal_(std=0.05, generator=generator)
    return world


def test_a_saved_model_is_loaded_bit_for_bit(clips: ClipSampler, tmp_path: Path) -> None:
    world, reward_model = dot_episodes.models()
    path = tmp_path / "world.safetensors"
    save_world_model(
        randomized(world), reward_model, path, reference_error=0.25, metrics={"success_auc": 0.9}, reward_every=2
    )
    loaded = load_world_model(path)
    assert loaded.info.reference_error == 0.25
    for name, value in world.state_dict().items():
        assert torch.equal(value, loaded.dynamics.state_dict()[name]), name
    path.write_bytes(path.read_bytes().replace(b"vla-rl world model 3", b"vla-rl world model 2"))
    with pytest.raises(WorldModelError, match=r"format 'vla-rl world model 2', not .*; fit it again"):
        load_world_model(path)
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(WorldModelError, match="truncated or not a world model"):
        load_world_model(path)
    with pytest.raises(WorldModelError, match="fit one with: vla-rl world-model fit"):
        load_world_model(tmp_path / "nothing")
