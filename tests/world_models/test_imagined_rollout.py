"""Imagined rollouts that are driven an action at a time, and where they diverge from the true episode."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from sims.vector_env import StartState
from tests import dot_episodes
from world_models.bundle import load_world_model, save_world_model
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.divergence import Distance, Divergence, image_difference, reference_image_difference
from world_models.imagined_rollout import ImaginedRollout

H = dot_episodes.HORIZON


def actions(steps: int) -> torch.Tensor:
    return torch.rand(steps, 2, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_it_is_what_the_imagined_environment_shows_and_can_be_taken_back(tmp_path: Path) -> None:
    env = dot_episodes.imagined_env(tmp_path / "episodes", max_steps=40)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in env.model.parameters():
            weight.add_(0.03 * torch.randn_like(weight))  # untrained it repeats the first frame
    path = tmp_path / "world.safetensors"
    save_world_model(env.model, env.reward_model, path, reference_error=0.5, metrics={}, reward_every=2)
    start, steps = StartState(task=0, seed=11), actions(2 * H + 1)
    env.reset(start=[start] * 3)
    rollout = ImaginedRollout(load_world_model(path), env.observe([0]), seed=start.seed)
    shown = [env.observe([0]).images[0]]
    for action in steps:
        env.step(action.expand(3, -1))
        shown.append(env.observe([0]).images[0])
        rollout.step(action)
    assert not torch.equal(shown[0], shown[-1])
    imagined = torch.stack([moment.images for moment in rollout.moments])
    torch.testing.assert_close(imagined, torch.stack(shown), atol=1, rtol=0)  # in batches of 1 and of 3
    errors = [one.error for one in rollout.moments[::2]]  # the environment estimates its error every other step
    assert max(errors) == pytest.approx(2 * float(env.error[0]), rel=1e-5)  # reference: 0.5, in the environment 1
    rollout.rewind(H + 1)
    for i in range(H + 1, len(steps)):
        assert torch.equal(rollout.step(steps[i]).images, shown[i + 1])


def images(place: int) -> torch.Tensor:
    """One camera, 2 x 10 pixels, of which a column is white."""
    image = torch.zeros(1, 2, 10, 3, dtype=torch.uint8)
    image[:, :, place] = 255
    return image


def locate(frames: torch.Tensor, instructions: list[str]) -> torch.Tensor:
    """A white column is a centimeter wide; NaN where there is none."""
    columns = frames[:, 0, 0, :, 0]
    place = columns.float().argmax(1).float() / 100
    return torch.where(columns.amax(1) > 0, place, torch.nan)[:, None].expand(-1, 2) / 2**0.5


def test_distances_and_divergence_by_hand() -> None:
    divergence = Divergence(reference_image_difference=60.0, locate=locate)  # type: ignore[arg-type]
    black = torch.zeros_like(images(0))
    same, near, far = (divergence.distance(images(4), images(place), "") for place in (4, 5, 7))
    assert same == Distance(image=0.0, object_m=0.0)
    assert near.image == far.image == pytest.approx(2 * 255 / 10)
    assert near.object_m == pytest.approx(0.01)
    assert far.object_m == pytest.approx(0.03)
    assert [divergence.reason(one) for one in (same, near, far)] == [None, None, "object"]
    assert divergence.first([same, near, far, same]) == 2
    assert divergence.first([same, near]) is None
    assert Divergence(reference_image_difference=50.0, locate=None).reason(near) == "image"
    assert divergence.distance(images(4), black, "").object_m == pytest.approx(0.1)  # lost
    assert divergence.distance(black, images(4), "").object_m is None  # not to be seen in truth


def test_the_reference_difference_is_a_quantile_of_single_predictions(tmp_path: Path) -> None:
    """An untrained model repeats the current frame, so its error is what moves within a chunk."""
    clips = ClipSampler([dot_episodes.store(tmp_path / "dots")], action_horizon=H)
    model, _ = dot_episodes.models()
    model.fit_scales(*clips.statistics())
    drawn = clips.draw(np.random.default_rng(3), 40, 1).frames
    first = torch.stack([clips.clip(episode, 0, 1).frames for episode in range(len(clips.entries))])
    expected = max(np.quantile(image_difference(frames[:, 0], frames[:, 1]).numpy(), 0.95) for frames in (drawn, first))
    assert reference_image_difference(model, clips, seed=3, count=40) == pytest.approx(expected, rel=0.05)
    assert expected > 1
