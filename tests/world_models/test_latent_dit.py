"""The latent transformer on a small autoencoder: cache, attention, that it learns, sizes, saving."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import dot_episodes
from world_models.bundle import load_world_model, save_world_model
from world_models.data.clip import Clip, first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.models.autoencoder import AutoencoderConfig
from world_models.models.causal_transformer import CausalTransformer, block_causal
from world_models.models.latent_dit import LatentDiT, LatentDiTConfig
from world_models.training.autoencoder import AutoencoderFit, AutoencoderFitConfig
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig
from world_models.world_model import WorldModelError

H = dot_episodes.HORIZON
TINY = AutoencoderConfig(
    settings={
        "encoder_block_out_channels": [8, 8, 8],
        "decoder_block_out_channels": [8, 8, 8],
        "num_encoder_blocks": [1, 1, 1],
        "num_decoder_blocks": [1, 1, 1],
        "latent_channels": 4,
    },
)
DIT = LatentDiTConfig(action_horizon=H, autoencoder=TINY, width=64, depth=2, heads=2, steps=2)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler([dot_episodes.store(tmp_path_factory.mktemp("dots") / "store")], action_horizon=H)


def untrained(clips: ClipSampler, config: LatentDiTConfig = DIT) -> LatentDiT:
    torch.manual_seed(0)
    world = LatentDiT(config, dot_episodes.ROBOT)
    world.fit_scales(*clips.statistics())
    world.codec.fit_scales(clips.draw(np.random.default_rng(0), 32, 1).frames.flatten(0, 2))
    return world.eval()


def randomized(world: LatentDiT) -> LatentDiT:
    """The output layers, zero at first, set to random weights."""
    generator = torch.Generator().manual_seed(0)
    for layer in (world.out, world.state[-1]):
        layer.weight.data.normal_(std=0.1, generator=generator)
    return world


def drawn(clips: ClipSampler, count: int = 6) -> Clip:
    return clips.draw(np.random.default_rng(1), count, 1)


def test_block_causal_mask() -> None:
    yes, no = True, False
    expected = [[yes, yes, yes, yes, no, no]] * 2 + [[yes] * 6] * 2
    assert block_causal(2, num_past=1, size=2, device=torch.device("cpu")).tolist() == expected


def test_blocks_one_by_one_with_the_cache_equal_all_blocks_at_once() -> None:
    torch.manual_seed(0)
    transformer = CausalTransformer(width=32, depth=3, heads=2, grid=(2, 2, 2))
    tokens, condition = torch.randn(3, 4, 8, 32), torch.randn(3, 4, 32)
    whole, _ = transformer(tokens, condition)
    past, parts = None, []
    for block in range(4):
        hidden, new = transformer(tokens[:, block : block + 1], condition[:, block : block + 1], past)
        past = new if past is None else tuple(torch.cat(pair, dim=-2) for pair in zip(past, new, strict=True))
        parts.append(hidden)
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, rtol=1e-4, atol=1e-5)
    tokens[:, 3] += 1
    again, _ = transformer(tokens, condition)
    torch.testing.assert_close(again[:, :3], whole[:, :3])
    assert (again[:, 3] - whole[:, 3]).abs().mean() > 0.1


def test_sampling_with_the_cache_equals_sampling_without(clips: ClipSampler) -> None:
    """Two denoising steps over the prefill, and over all four blocks each time."""
    world = randomized(untrained(clips))
    clip = drawn(clips)
    history, action, length = first_history(world, clip), clip.action[:, 0], clip.length[:, 0]
    noise = world.noise(6, torch.Generator().manual_seed(0))
    imagined = world.sample_chunk(world.prefill(history), action, length, noise)
    x, clear = noise, torch.zeros(6)
    with torch.no_grad():
        for t, dt in ((1.0, 0.5), (0.5, 0.5)):
            context = world.context_blocks(history, clear)
            block = world.next_block(history, action, length, x, torch.full((6,), t))
            tokens, condition = (torch.cat(pair, dim=1) for pair in zip(context, block, strict=True))
            hidden = world.norm(world.transformer(tokens, condition)[0][:, 3].unflatten(1, (2, -1)))
            clean = history.current + world._unpatch(world.out(hidden))
            x = x - dt * (x - clean) / t
    assert (x - noise).abs().mean() > 0.5
    torch.testing.assert_close(imagined.latent, x, rtol=1e-3, atol=1e-4)


def test_an_untrained_model_repeats_the_current_frame(clips: ClipSampler) -> None:
    world, clip = untrained(clips, replace(DIT, steps=1)), drawn(clips)
    history = first_history(world, clip)
    noise = world.noise(6, torch.Generator().manual_seed(0))
    imagined = world.sample_chunk(world.prefill(history), clip.action[:, 0], clip.length[:, 0], noise)
    torch.testing.assert_close(imagined.latent, history.current, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(imagined.state, history.state)


def test_it_reads_executed_actions_alone(clips: ClipSampler) -> None:
    world, clip = randomized(untrained(clips)), drawn(clips)
    prefill, length = world.prefill(first_history(world, clip)), torch.tensor([1, 2, 3, 1, 2, 3])
    noise, action = world.noise(6, torch.Generator().manual_seed(0)), clip.action[:, 0].clone()
    first = world.sample_chunk(prefill, action, length, noise).latent
    for row, taken in enumerate(length.tolist()):
        action[row, taken:] = 0.77
    assert torch.equal(world.sample_chunk(prefill, action, length, noise).latent, first)
    action[:, 0] += 0.5
    assert not torch.equal(world.sample_chunk(prefill, action, length, noise).latent, first)
    blind = randomized(untrained(clips, replace(DIT, actions=False)))
    prefill = blind.prefill(first_history(blind, clip))
    assert torch.equal(
        blind.sample_chunk(prefill, action, length, noise).latent,
        blind.sample_chunk(prefill, -action, length, noise).latent,
    )


def test_bfloat16_is_float32_rounded(clips: ClipSampler) -> None:
    clip, length = drawn(clips), torch.full((6,), H)
    one, other = (randomized(untrained(clips, replace(DIT, precision=p))) for p in ("float32", "bfloat16"))
    noise = one.noise(6, torch.Generator().manual_seed(0))
    exact, rounded = (
        world.sample_chunk(world.prefill(first_history(world, clip)), clip.action[:, 0], length, noise)
        for world in (one, other)
    )
    assert other.prefill(first_history(other, clip)).keys.dtype == torch.bfloat16
    assert rounded.latent.dtype == torch.float32
    difference = (rounded.latent - exact.latent).abs().mean()
    assert 0 < difference < 0.02 * exact.latent.abs().mean()


def test_context_noise_is_for_fits_and_spares_the_first_frame(clips: ClipSampler) -> None:
    world = randomized(untrained(clips, replace(DIT, context_noise=0.5)))
    history = first_history(world, drawn(clips))
    clear, noised = world.prefill(history), world.prefill_to_fit(history, torch.Generator().manual_seed(0))
    block = clear.keys.shape[-2] // 3
    assert torch.equal(noised.keys[..., :block, :], clear.keys[..., :block, :])
    assert (noised.keys[..., block:, :] - clear.keys[..., block:, :]).abs().mean() > 0.05
    assert torch.equal(noised.history.current, clear.history.current)


def test_context_noise_hides_the_clear_frame(clips: ClipSampler) -> None:
    """In a fit the network's change depends on the noised current frame alone; it is added to the clear one."""
    world, clip = randomized(untrained(clips, replace(DIT, context_noise=0.5))), drawn(clips)
    prefill = world.prefill_to_fit(first_history(world, clip), torch.Generator().manual_seed(0))
    noise = world.noise(6, torch.Generator().manual_seed(1))

    def change(current: torch.Tensor) -> torch.Tensor:
        with_it = replace(prefill, history=replace(prefill.history, current=current))
        estimate = world.estimate(with_it, clip.action[:, 0], clip.length[:, 0], noise, torch.ones(6))
        return estimate.latent - current

    clear = prefill.history.current
    assert change(clear).abs().mean() > 0.05
    torch.testing.assert_close(change(clear + 1), change(clear), rtol=1e-4, atol=1e-5)


def test_it_learns_the_motion_of_the_dot(clips: ClipSampler) -> None:
    """In the latents of an untrained autoencoder, better than a copy; the state by actions alone."""
    world = untrained(clips, replace(DIT, steps=1))
    fit = DynamicsFit(
        world, DynamicsFitConfig(steps=120, batch_size=16, learning_rate=4e-3, warmup=10, roll_in=0.0), clips, seed=0
    )
    while fit.step < fit.steps:
        metrics = fit.update()
    assert np.isfinite(metrics["loss"])
    clip = clips.draw(np.random.default_rng(9), 64, 1)
    history, length = first_history(world, clip), clip.length[:, 0]
    imagined = world.sample_chunk(
        world.prefill(history), clip.action[:, 0], length, world.noise(64, torch.Generator().manual_seed(0))
    )
    truth = world.encode(clip.frames[:, 1])
    assert (imagined.latent - truth).square().mean() < 0.5 * (history.current - truth).square().mean()
    gone, missed = clip.state[:, 1] - clip.state[:, 0], imagined.state - clip.state[:, 1]
    assert missed[:, 0].abs().mean() < 0.3 * gone[:, 0].abs().mean()


def test_an_autoencoder_learns_images_and_scales_its_latents(clips: ClipSampler) -> None:
    codec = untrained(clips).codec
    config = AutoencoderFitConfig(steps=60, batch_size=8, learning_rate=5e-3, warmup=5)
    fit = AutoencoderFit(codec, config, clips, seed=0)
    first = fit.update()["reconstruction"]
    while fit.step < fit.steps:
        last = fit.update()["reconstruction"]
    assert last < 0.5 * first
    frames = drawn(clips, 32).frames.flatten(0, 2)
    codec.fit_scales(frames)
    latent = codec.encode(frames)
    torch.testing.assert_close(latent.mean((0, 2, 3)), torch.zeros(4), atol=1e-4, rtol=0)
    torch.testing.assert_close(latent.std((0, 2, 3)), torch.ones(4), atol=1e-3, rtol=0)
    assert codec.decode(latent).shape == frames.shape and codec.decode(latent).dtype == torch.uint8


def test_sizes_come_from_settings() -> None:
    def parameters(width: int, depth: int) -> float:
        with torch.device("meta"):
            transformer = CausalTransformer(width=width, depth=depth, heads=width // 64, grid=(2, 8, 8))
        return sum(p.numel() for p in transformer.parameters()) / 1e6

    assert 1 < parameters(128, 6) < 2
    assert 85 < parameters(768, 12) < 110
    assert 290 < parameters(1024, 24) < 330


@pytest.mark.parametrize("settings", [
    ("AutoencoderKL", {"block_out_channels": [8, 8], "down_block_types": ["DownEncoderBlock2D"] * 2,
                       "up_block_types": ["UpDecoderBlock2D"] * 2, "latent_channels": 4, "norm_num_groups": 2}),
    ("AutoencoderDC", {"latent_channels": 4, "attention_head_dim": 4, "encoder_block_types": "ResBlock",
                       "decoder_block_types": "ResBlock", "encoder_block_out_channels": [8, 8],
                       "decoder_block_out_channels": [8, 8], "encoder_layers_per_block": [1, 1],
                       "decoder_layers_per_block": [1, 1], "encoder_qkv_multiscales": [[], []],
                       "decoder_qkv_multiscales": [[], []]}),
])  # fmt: skip
def test_other_autoencoders_fit_too(clips: ClipSampler, settings: tuple, tmp_path: Path) -> None:
    """Built from settings, and loaded from the folder that ``diffusers`` saves: the same latents."""
    kind, arguments = settings
    built = untrained(clips, replace(DIT, autoencoder=AutoencoderConfig(kind=kind, settings=arguments)))
    built.codec.network.save_pretrained(tmp_path)
    loaded = untrained(clips, replace(DIT, autoencoder=AutoencoderConfig(folder=tmp_path)))
    frames = drawn(clips).frames
    assert torch.equal(loaded.encode(frames), built.encode(frames))
    assert loaded.config.autoencoder.kind == kind and loaded.config.autoencoder.folder is None


def test_a_saved_model_predicts_the_same(clips: ClipSampler, tmp_path: Path) -> None:
    world, path = randomized(untrained(clips)), tmp_path / "world.safetensors"
    save_world_model(world, dot_episodes.models()[1], path, reference_error=0.25, metrics={}, reward_every=2)
    loaded = load_world_model(path).dynamics
    assert isinstance(loaded, LatentDiT) and loaded.config == world.config
    clip = drawn(clips)
    noise = world.noise(6, torch.Generator().manual_seed(0))
    one, other = (
        w.sample_chunk(w.prefill(first_history(w, clip)), clip.action[:, 0], clip.length[:, 0], noise).latent
        for w in (world, loaded)
    )
    assert torch.equal(one, other)


def test_bad_settings_are_refused(tmp_path: Path) -> None:
    cases = {
        "does not divide the latents' 4 x 4 cells": replace(DIT, patch=3),
        "AutoencoderTiny cannot be built": replace(DIT, autoencoder=AutoencoderConfig(settings={"widht": 3})),
        "has no config.json": replace(DIT, autoencoder=AutoencoderConfig(folder=tmp_path)),
    }
    for message, config in cases.items():
        with pytest.raises(WorldModelError, match=message):
            LatentDiT(config, dot_episodes.ROBOT)
    with pytest.raises(ValueError, match="multiple of 4 heads"):
        LatentDiTConfig(width=100, heads=8)
