"""Weights in Wan's layout: a tiny random pipeline, saved by ``diffusers`` and loaded as a world model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from safetensors.torch import load_model

from tests import dot_episodes
from world_models.bundle import load_world_model, save_world_model
from world_models.data.clip import first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.models.autoencoder import AutoencoderConfig
from world_models.models.wan import WanConfig, WanWorldModel
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig
from world_models.world_model import WorldModelError

H = dot_episodes.HORIZON


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler([dot_episodes.store(tmp_path_factory.mktemp("dots") / "store")], action_horizon=H)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Latents of 4 channels and 4 x 4 cells per camera."""
    folder = tmp_path_factory.mktemp("wan")
    torch.manual_seed(0)
    WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16, freq_dim=16,
        ffn_dim=32, num_layers=1,
    ).save_pretrained(folder / "transformer")  # fmt: skip
    AutoencoderKLWan(
        base_dim=8, z_dim=4, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True],
        latents_mean=[0.1, 0.2, 0.3, 0.4], latents_std=[2.0, 2.0, 3.0, 3.0],
    ).save_pretrained(folder / "vae")  # fmt: skip
    return folder


def loaded(pipeline: Path, clips: ClipSampler) -> WanWorldModel:
    torch.manual_seed(1)
    world = WanWorldModel(
        WanConfig(action_horizon=H, folder=pipeline, action_tokens=3, width=32, steps=2), dot_episodes.ROBOT
    )
    world.fit_scales(*clips.statistics())
    return world.eval()


def test_its_prediction_equals_the_pipelines(pipeline: Path, clips: ClipSampler) -> None:
    """Known frames at time 0, the noisy one at s, cameras side by side; the clean frame is x_s - s v."""
    world = loaded(pipeline, clips)
    assert world.latent_shape == (2, 4, 4, 4)
    clip = clips.draw(np.random.default_rng(0), 2, 1)
    history, noise = first_history(world, clip), world.noise(2, torch.Generator().manual_seed(0))
    t, action, length = torch.tensor([0.5, 1.0]), clip.action[:, 0], clip.length[:, 0]
    out = world.estimate(world.prefill(history), action, length, noise, t)
    transformer = WanTransformer3DModel.from_config(WanTransformer3DModel.load_config(pipeline / "transformer"))
    load_model(transformer, pipeline / "transformer" / "diffusion_pytorch_model.safetensors")
    tokens = world.action_tokens(world.condition(world.conditioning(history, action, length, t))).view(2, 3, 16)
    video = torch.zeros(2, 4, 4, 4, 8)
    for frame, latent in enumerate((history.first, history.previous, history.current, noise)):
        video[:, :, frame, :, :4], video[:, :, frame, :, 4:] = latent[:, 0], latent[:, 1]
    times = torch.zeros(2, 4, 8)
    times[:, 3] = t[:, None] * 1000
    velocity = transformer(video, times.flatten(1), tokens).sample[:, :, 3]
    for camera, columns in ((0, slice(0, 4)), (1, slice(4, 8))):
        expected = noise[:, camera] - t[:, None, None, None] * velocity[..., columns]
        torch.testing.assert_close(out.latent[:, camera], expected, rtol=1e-4, atol=1e-5)


def test_latents_have_the_pipelines_scale(pipeline: Path, clips: ClipSampler) -> None:
    world = loaded(pipeline, clips)
    images = clips.draw(np.random.default_rng(0), 2, 1).frames[:, 0]
    world.codec.fit_scales(images.flatten(0, 1))  # keeps the pipeline's own scales
    vae = AutoencoderKLWan.from_pretrained(pipeline / "vae", low_cpu_mem_usage=False)
    pixels = images[:, 0].permute(0, 3, 1, 2).float() / 127.5 - 1
    with torch.no_grad():
        latent = vae.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0]
    mean, std = torch.tensor([0.1, 0.2, 0.3, 0.4]), torch.tensor([2.0, 2.0, 3.0, 3.0])
    expected = (latent - mean[:, None, None]) / std[:, None, None]
    torch.testing.assert_close(world.encode(images)[:, 0], expected, rtol=1e-4, atol=1e-5)
    assert world.decode(world.encode(images)).shape == images.shape


def test_it_is_fitted_to_actions_and_needs_no_folder_afterwards(
    pipeline: Path, clips: ClipSampler, tmp_path: Path
) -> None:
    folder = tmp_path / "wan"
    shutil.copytree(pipeline, folder)
    world = loaded(folder, clips)
    before = {name: value.clone() for name, value in world.state_dict().items()}
    fit = DynamicsFit(world, DynamicsFitConfig(steps=3, batch_size=4, warmup=1, roll_in_from=0.0), clips, seed=0)
    for _ in range(3):
        assert np.isfinite(fit.update()["loss"])
    changed = {name for name, value in world.state_dict().items() if not torch.equal(value, before[name])}
    assert {"action_tokens.weight", "condition.0.weight", "transformer.blocks.0.attn2.to_k.weight"} <= changed
    assert not any(name.startswith("codec.") for name in changed)
    save_world_model(
        world, dot_episodes.models()[1], tmp_path / "world.safetensors", reference_error=1.0, metrics={}, reward_every=2
    )
    shutil.rmtree(folder)
    again = load_world_model(tmp_path / "world.safetensors").dynamics
    clip = clips.draw(np.random.default_rng(0), 2, 1)
    noise = world.noise(2, torch.Generator().manual_seed(0))

    def predict(model, action: torch.Tensor) -> torch.Tensor:
        return model.sample_chunk(model.prefill(first_history(model, clip)), action, clip.length[:, 0], noise).latent

    assert torch.equal(predict(again, clip.action[:, 0]), predict(world, clip.action[:, 0]))
    assert not torch.equal(predict(world, clip.action[:, 0] + 0.5), predict(world, clip.action[:, 0]))


def test_pipelines_that_do_not_fit_are_refused(pipeline: Path, tmp_path: Path) -> None:
    with pytest.raises(WorldModelError, match="has no config"):
        WanWorldModel(WanConfig(folder=tmp_path), dot_episodes.ROBOT)
    folder = tmp_path / "wan"
    shutil.copytree(pipeline, folder)
    settings = json.loads((folder / "vae" / "config.json").read_text())
    (folder / "vae" / "config.json").write_text(json.dumps(settings | {"_class_name": "VQModel"}))
    with pytest.raises(WorldModelError, match="holds a VQModel, allowed are AutoencoderTiny"):
        WanWorldModel(WanConfig(folder=folder), dot_episodes.ROBOT)
    transformer = json.loads((pipeline / "transformer" / "config.json").read_text())
    other = {name: value for name, value in transformer.items() if name[0] != "_"} | {"in_channels": 9}
    vae = AutoencoderConfig(folder=pipeline / "vae")
    with pytest.raises(WorldModelError, match="takes 9 and gives 4 channels, the autoencoder has 4"):
        WanWorldModel(WanConfig(transformer=other, autoencoder=vae), dot_episodes.ROBOT)
