"""Distillation: one step lands where the teacher's four do, on a world that looks random and in a hand-made walk."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import dot_world
from world_models.data.clips import ClipSampler
from world_models.models.conv_flow import ConvFlow
from world_models.training.distill import DistillConfig, Distiller
from world_models.training.fit import FitConfig, Fitter, first_moment


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler([dot_world.store(tmp_path_factory.mktemp("dots") / "store")], action_horizon=dot_world.HORIZON)


def teacher(clips: ClipSampler, fit_steps: int) -> ConvFlow:
    """It sees no actions, so where the dot goes is up to the noise: one step shows the mean of all futures."""
    torch.manual_seed(0)
    world = ConvFlow(replace(dot_world.WORLD, actions=False, steps=4), dot_world.ROBOT)
    world.fit_scales(*clips.statistics())
    config = FitConfig(steps=max(1, fit_steps), batch_size=16, learning_rate=3e-3, warmup=10, go_on=0, full_noise=0.2)
    fitter = Fitter(world, config, clips, seed=0)
    for _ in range(fit_steps):
        fitter.update()
    return world.eval()


def test_the_student_is_closer_to_its_teacher_than_the_teacher_in_one_step(clips: ClipSampler) -> None:
    world = teacher(clips, 80)
    four, one = copy.deepcopy(world), copy.deepcopy(world)
    one.config = replace(one.config, steps=1)
    distiller = Distiller(
        world, DistillConfig(steps=50, batch_size=16, warmup=10, go_on=0, learning_rate=2e-3), clips, seed=0
    )
    while distiller.step < distiller.steps:
        distiller.update()
    assert world.config.steps == 1
    clip = clips.draw(np.random.default_rng(5), 64, 1)
    noise, length = world.noise(64, torch.Generator().manual_seed(7)), clip.length[:, 0]

    def imagine(model: ConvFlow) -> torch.Tensor:
        return model.sample_chunk(model.prefill(first_moment(model, clip)), clip.action[:, 0], length, noise).latent

    target = imagine(four)
    student, undistilled = ((imagine(model) - target).square().mean().item() for model in (world, one))
    assert student < 0.5 * undistilled, (student, undistilled)


@pytest.mark.parametrize("to", [1, 2])
def test_a_student_that_answers_the_targets_lands_where_its_teacher_does(clips: ClipSampler, to: int) -> None:
    """The target of Algorithm 2 in one Euler step: x_t - (t - t') (x_t - x~) / t = x_t'."""
    world = teacher(clips, 5)
    distiller = Distiller(world, DistillConfig(to=to), clips, seed=0)
    clip = clips.draw(np.random.default_rng(5), 16, 1)
    memory, truth = world.prefill(first_moment(world, clip)), world.encode(clip.frames[:, 1])
    action, length = clip.action[:, 0], clip.length[:, 0]
    with torch.no_grad():
        x, t, clean = distiller.example(memory, action, length, truth)
    assert sorted(set(t.tolist())) == [(i + 1) / to for i in range(to)]
    t_ = t[:, None, None, None, None]
    landed = x - (x - clean) / to / t_
    with torch.no_grad():  # the teacher, from the same state on
        for _ in range(4 // to):
            told = distiller.teacher.denoised(memory, action, length, x, t)
            x, t = x - (x - told.latent) / 4 / t[:, None, None, None, None], t - 0.25
    torch.testing.assert_close(landed, x, rtol=1e-4, atol=1e-4)


def test_steps_must_go_in_evenly(clips: ClipSampler) -> None:
    with pytest.raises(ValueError, match=r"must divide the teacher's 4 steps \(world.steps\), got 3"):
        Distiller(teacher(clips, 0), DistillConfig(to=3), clips, seed=0)
