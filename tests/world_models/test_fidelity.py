"""The trust report on a world where everything is known."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from tests import dot_world
from world_models.data.clips import ClipSampler
from world_models.fidelity import (
    LOST_M,
    MOVED_M,
    bootstrap,
    imagined_success,
    open_loop,
    own_scripts,
    set_thresholds,
    swapped_scripts,
    trust_report,
)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler([dot_world.store(tmp_path_factory.mktemp("dots") / "store", 24)], action_horizon=4)


def locate(images: torch.Tensor, words: Sequence[str]) -> torch.Tensor:
    """Center of the red pixels, a centimeter each."""
    red = (images[:, 0, :, :, 0] > 170).float()
    x = torch.einsum("bhw,w->b", red, torch.arange(16.0)) / red.flatten(1).sum(1)
    return torch.stack([0.01 * x, torch.zeros_like(x)], dim=1)


def test_a_model_that_repeats_the_start_is_as_good_as_a_copy(clips: ClipSampler) -> None:
    world, _ = dot_world.models()
    world.fit_scales(*clips.statistics())
    with torch.no_grad():
        out = world.out.bias.view(world.sources + 4, -1)  # mixture sources + 1, content 3
        out[1:-3] = -30.0  # the last frame as it was, nothing else
    rows = open_loop(world, clips, horizons=(1, 2), locate=locate, seed=0)
    for row in rows:
        assert row["psnr"] == pytest.approx(row["copy_psnr"], abs=1e-3)
        assert row["object_error_m"] == pytest.approx(row["copy_object_error_m"], abs=1e-6)
        assert MOVED_M < row["object_error_m"] <= LOST_M
        assert row["object_error_m_count"] > 0


def test_swapped_scripts_put_one_episodes_actions_at_anothers_start(clips: ClipSampler) -> None:
    scripts = swapped_scripts(clips, seed=0, count=5)
    assert len(scripts) == 5
    for script in scripts:
        assert clips.entries[script.episode].success
        own = clips.actions(script.episode)
        assert script.action.shape != own.shape or not torch.equal(script.action, own)
    assert [len(script.action) for script in own_scripts(clips)] == [entry.steps for entry in clips.entries]


def test_verdicts_of_a_judge_without_doubts(clips: ClipSampler) -> None:
    world, outcome = dot_world.models()
    world.fit_scales(*clips.statistics())
    scripts = own_scripts(clips)
    outcome.success_threshold.fill_(-1.0)
    won, score = imagined_success(world, outcome, clips, scripts, seed=0, every=2)
    assert won.all()
    assert ((score > 0) & (score < 1)).all()
    outcome.success_threshold.fill_(2.0)
    outcome.failed_threshold.fill_(2.0)
    assert not imagined_success(world, outcome, clips, scripts, seed=0, every=2)[0].any()


def test_estimates_are_fair_and_rewards_strict(clips: ClipSampler) -> None:
    """As many episodes as truly succeed pass the one threshold, at most the allowed share of failures the other."""
    world, outcome = dot_world.models()
    world.fit_scales(*clips.statistics())
    outcome.failed_threshold.fill_(2.0)
    scripts, truth = own_scripts(clips), torch.tensor([entry.success for entry in clips.entries])
    outcome.config = dataclasses.replace(outcome.config, false_success=0.1)
    thresholds = set_thresholds(world, outcome, clips, seed=0, every=2)
    won, score = imagined_success(world, outcome, clips, scripts, seed=0, every=2)
    assert torch.equal(won, score > thresholds["success_threshold"])
    assert won.sum() <= truth.sum() < (score >= thresholds["success_threshold"]).sum()
    rewarded = score > thresholds["reward_threshold"]
    assert rewarded[~truth].float().mean() <= 0.1
    assert not (rewarded & ~won).any()


def test_the_report_has_every_figure_of_the_contract(clips: ClipSampler) -> None:
    world, outcome = dot_world.models()
    world.fit_scales(*clips.statistics())
    report = trust_report(
        world, outcome, clips, env=None, no_action=world, locate=locate, every=2, horizons=(1, 2), swaps=4
    )
    for name in ("psnr", "copy_psnr", "object_error_m", "copy_object_error_m"):
        assert len(report[name]) == len(report["horizons"]) == 2
        assert all(math.isfinite(value) for value in report[name])
    assert report["hallucinated_success"] == report["no_action_hallucinated_success"]
    assert report["swapped_scripts"] == 4
    assert 0 <= report["success_auc"] <= 1
    assert report["delta_success"] == pytest.approx(abs(report["imagined_success"] - report["true_success"]))
    won = [entry.success for entry in clips.entries]
    assert report["true_success"] == pytest.approx(sum(won) / len(won))


def test_bootstrap_interval_covers_the_mean_of_a_known_sample() -> None:
    values = np.arange(101.0)
    low, high = bootstrap(values, np.random.default_rng(0))  # type: ignore[misc]
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert low == pytest.approx(50 - half, abs=1.0)
    assert high == pytest.approx(50 + half, abs=1.0)
    assert bootstrap(values[:1], np.random.default_rng(0)) is None
