"""The outcome model's arithmetic, and that it learns to tell looks apart on real and imagined pictures."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from policies.compact_vla import VLA, VLAConfig
from tests import dot_world
from world_models.bundle import WorldInfo, check_robot
from world_models.data.clips import FAILED, RUNNING, SUCCESS, ClipSampler
from world_models.reward_model import (
    LIMITS,
    OutcomeFitter,
    auc,
    best_threshold,
    calibrate,
    imagine_looks,
    real_looks,
    threshold_passed_by,
)
from world_models.world_model import WorldModelError


def test_auc_is_the_share_of_pairs_in_order() -> None:
    score = torch.tensor([0.1, 0.4, 0.35, 0.8, 0.4])
    truth = torch.tensor([False, False, True, True, True])
    pairs = [(p > n) + 0.5 * (p == n) for p in score[truth].tolist() for n in score[~truth].tolist()]
    assert auc(score, truth) == pytest.approx(sum(pairs) / len(pairs))
    assert auc(-score, truth) == pytest.approx(1 - sum(pairs) / len(pairs))


def test_the_best_threshold_lies_between_the_classes() -> None:
    threshold, gain = best_threshold(torch.tensor([0.9, 0.8, 0.3, 0.1]), torch.tensor([True, True, False, False]))
    assert threshold == pytest.approx(0.55)
    assert gain == pytest.approx(1.0)


def test_a_threshold_is_passed_by_as_many_as_asked() -> None:
    score = torch.tensor([0.9, 0.8, 0.7, 0.6, 0.4])
    for count in (0, 1, 3):
        assert (score > threshold_passed_by(score, count)).sum() == count
    assert threshold_passed_by(score, 5) == LIMITS[0]
    assert threshold_passed_by(torch.tensor([0.99]), 0) == LIMITS[1]


def test_shifted_pictures_keep_their_pixels(tmp_path: Path) -> None:
    """Some pixel of the frame moved by at most two each way, edges repeated; cameras and rows each their own way."""
    clips = ClipSampler([dot_world.store(tmp_path / "dots", 40)], action_horizon=dot_world.HORIZON)
    world, outcome = dot_world.models()
    fitter = OutcomeFitter(outcome, clips, imagine_looks(world, clips, outcome.config, count=4, seed=0), seed=0)
    index = torch.arange(dot_world.SIZE)
    frames = torch.stack([index[:, None].expand(-1, len(index)), index.expand(len(index), -1)], dim=-1)
    frames = torch.cat([frames, frames[..., :1]], dim=-1).to(torch.uint8).expand(50, 2, -1, -1, -1)
    moved = fitter._shifted(frames)[..., :2].long()
    by = moved[:, :, 8, 8] - 8
    expected = torch.stack(torch.meshgrid(index, index, indexing="ij"), dim=-1) + by[:, :, None, None]
    torch.testing.assert_close(moved, expected.clamp(0, dot_world.SIZE - 1))
    assert sorted(by.unique().tolist()) == [-2, -1, 0, 1, 2]


def test_it_learns_to_judge(tmp_path: Path) -> None:
    """Real looks of episodes it was not trained on: right edge, left edge, anywhere between."""
    clips = ClipSampler([dot_world.store(tmp_path / "fit", 60)], action_horizon=dot_world.HORIZON)
    other = ClipSampler([dot_world.store(tmp_path / "other", 90)], action_horizon=dot_world.HORIZON, part="held_out")
    world, outcome = dot_world.models()
    world.fit_scales(*clips.statistics())
    outcome.normalizer.load_state_dict(world.normalizer.state_dict())
    imagined = imagine_looks(world, clips, outcome.config, count=40, seed=0)
    assert set(imagined.outcome.unique().tolist()) == {RUNNING, SUCCESS, FAILED}
    assert imagined.nearly.any()
    assert (imagined.outcome[imagined.nearly] == RUNNING).all()
    fitter = OutcomeFitter(outcome, clips, imagined, seed=0)
    outcome.train()
    for _ in range(outcome.config.steps):
        fitter.update()
    looks = real_looks(other, np.arange(len(other)))
    metrics = calibrate(outcome, looks)
    assert metrics["success_auc"] > 0.95
    assert metrics["failed_auc"] > 0.95
    verdict = outcome.judge(
        outcome.read(looks.first, looks.first_state, looks.text), looks.images, looks.state, looks.text, strict=False
    )
    assert not (verdict.success & verdict.failed).any()
    assert (verdict.success == (looks.outcome == SUCCESS)).float().mean() > 0.9


def test_too_few_successes_are_refused_in_one_line(tmp_path: Path) -> None:
    clips = ClipSampler([dot_world.store(tmp_path / "dots", 3)], action_horizon=dot_world.HORIZON)
    world, outcome = dot_world.models()
    imagined = imagine_looks(world, clips, outcome.config, count=4, seed=0)
    outcome.config = dataclasses.replace(outcome.config, min_successes=4)
    with pytest.raises(WorldModelError, match=r"the episodes hold \d successes, a reward needs at least 4"):
        OutcomeFitter(outcome, clips, imagined, seed=0)


def test_a_policy_of_another_robot_is_refused() -> None:
    world, outcome = dot_world.models()
    info = WorldInfo(
        world=world.config,
        outcome=outcome.config,
        robot=dot_world.ROBOT,
        usual_error=1.0,
        metrics={},  # type: ignore[arg-type]
    )
    check_robot(info, dot_world.ROBOT, what="the policy p")
    other = dataclasses.replace(dot_world.ROBOT, cameras=("front",))
    with pytest.raises(
        WorldModelError, match=r"has cameras \('front', 'flipped'\), the policy p has \('front',\); fit"
    ):
        check_robot(info, other, what="the policy p")


def test_a_policy_of_another_shape_is_refused(tmp_path: Path) -> None:
    _, outcome = dot_world.models()
    with pytest.raises(WorldModelError, match=r"outcome\.vla differs from the policy's vla"):
        outcome.start_from(VLA(VLAConfig(), cameras=2, state_dim=2, action_dim=2), outcome.normalizer)
