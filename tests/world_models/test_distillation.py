"""Distillation: one step of the student replaces four of its teacher, fitted and with exact answers."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests import dot_episodes
from world_models.data.clip import first_history
from world_models.data.clip_sampler import ClipSampler
from world_models.models.conv_flow import ConvFlow
from world_models.training.distillation import Distillation, DistillConfig
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler(
        [dot_episodes.store(tmp_path_factory.mktemp("dots") / "store")], action_horizon=dot_episodes.HORIZON
    )


def teacher(clips: ClipSampler, fit_steps: int) -> ConvFlow:
    """It ignores the actions, so the motion depends on the noise and one step predicts the mean of all futures."""
    torch.manual_seed(0)
    world = ConvFlow(replace(dot_episodes.DYNAMICS, actions=False, steps=4), dot_episodes.ROBOT)
    world.fit_scales(*clips.statistics())
    config = DynamicsFitConfig(
        steps=max(1, fit_steps), batch_size=16, learning_rate=3e-3, warmup=10, roll_in=0.0, full_noise=0.2
    )
    fit = DynamicsFit(world, config, clips, seed=0)
    for _ in range(fit_steps):
        fit.update()
    return world.eval()


def test_the_student_is_closer_to_its_teacher_than_the_teacher_in_one_step(clips: ClipSampler) -> None:
    world = teacher(clips, 80)
    four, one = copy.deepcopy(world), copy.deepcopy(world)
    one.config = replace(one.config, steps=1)
    distillation = Distillation(
        world, DistillConfig(steps=50, batch_size=16, warmup=10, roll_in=0.0, learning_rate=2e-3), clips, seed=0
    )
    while distillation.step < distillation.steps:
        distillation.update()
    assert world.config.steps == 1
    clip = clips.draw(np.random.default_rng(5), 64, 1)
    noise, length = world.noise(64, torch.Generator().manual_seed(7)), clip.length[:, 0]

    def imagine(model: ConvFlow) -> torch.Tensor:
        return model.sample_chunk(model.prefill(first_history(model, clip)), clip.action[:, 0], length, noise).latent

    target = imagine(four)
    student, undistilled = ((imagine(model) - target).square().mean().item() for model in (world, one))
    assert student < 0.5 * undistilled, (student, undistilled)


@pytest.mark.parametrize("to", [1, 2])
def test_a_student_that_answers_the_targets_reaches_its_teachers_states(clips: ClipSampler, to: int) -> None:
    """The target of Algorithm 2 in one Euler step: x_t - (t - t') (x_t - x~) / t = x_t'."""
    world = teacher(clips, 5)
    distillation = Distillation(world, DistillConfig(to=to), clips, seed=0)
    clip = clips.draw(np.random.default_rng(5), 16, 1)
    prefill, truth = world.prefill(first_history(world, clip)), world.encode(clip.frames[:, 1])
    action, length = clip.action[:, 0], clip.length[:, 0]
    with torch.no_grad():
        x, t, clean = distillation.example(prefill, action, length, truth)
    assert sorted(set(t.tolist())) == [(i + 1) / to for i in range(to)]
    t_ = t[:, None, None, None, None]
    reached = x - (x - clean) / to / t_
    with torch.no_grad():  # the teacher, from the same state on
        for _ in range(4 // to):
            estimate = distillation.teacher.estimate(prefill, action, length, x, t)
            x, t = x - (x - estimate.latent) / 4 / t[:, None, None, None, None], t - 0.25
    torch.testing.assert_close(reached, x, rtol=1e-4, atol=1e-4)


def test_the_students_steps_must_divide_the_teachers(clips: ClipSampler) -> None:
    with pytest.raises(ValueError, match=r"must divide the teacher's 4 steps \(dynamics.steps\), got 3"):
        Distillation(teacher(clips, 0), DistillConfig(to=3), clips, seed=0)
