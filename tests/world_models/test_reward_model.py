"""The reward model learns to classify recorded and predicted observations, and may start from a policy's encoder."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from episodes.store import EpisodeStore
from policies.compact_encoder import CompactEncoder, CompactEncoderConfig, Forecast, HasCompactEncoder
from policies.normalizer import Normalizer
from tests import dot_episodes
from tests.dot_episodes import finish
from vla_rl.runs.checkpoint import load_tree, save_tree
from world_models.bundle import WorldModelInfo, check_robot
from world_models.data.clip import FAILED, RUNNING, SUCCESS
from world_models.data.clip_sampler import ClipSampler
from world_models.reward_model import RewardModel
from world_models.training.reward_model import (
    RewardModelFit,
    imagine_observations,
    label_recorded,
    set_failed_threshold,
    success_observations,
)
from world_models.world_model import WorldModelError

H = dot_episodes.HORIZON


def test_shifted_images_keep_their_pixels(tmp_path: Path) -> None:
    """Shifts are at most two pixels, edges repeat; cameras, examples, rows and columns are shifted independently."""
    clips = ClipSampler([dot_episodes.store(tmp_path / "dots", 40)], action_horizon=H)
    dynamics, model = dot_episodes.models()
    fit = RewardModelFit(model, clips, imagine_observations(dynamics, clips, model.config, count=4, seed=0), seed=0)
    index = torch.arange(dot_episodes.SIZE)
    frames = torch.stack([index[:, None].expand(-1, len(index)), index.expand(len(index), -1)], dim=-1)
    frames = torch.cat([frames, frames[..., :1]], dim=-1).to(torch.uint8).expand(50, 2, -1, -1, -1)
    moved = fit._shift(frames)[..., :2].long()
    by = moved[:, :, 8, 8] - 8
    expected = torch.stack(torch.meshgrid(index, index, indexing="ij"), dim=-1) + by[:, :, None, None]
    torch.testing.assert_close(moved, expected.clamp(0, dot_episodes.SIZE - 1))
    assert sorted(by.unique().tolist()) == [-2, -1, 0, 1, 2]
    assert len(by.flatten(0, 1).unique(dim=0)) == 5 * 5


def test_it_learns_to_classify(tmp_path: Path) -> None:
    """Recorded observations of other episodes: right edge, left edge, anywhere between."""
    clips = ClipSampler([dot_episodes.store(tmp_path / "fit", 60)], action_horizon=H)
    other = ClipSampler([dot_episodes.store(tmp_path / "other", 90)], action_horizon=H, part="held_out")
    dynamics, model = dot_episodes.models()
    dynamics.fit_scales(*clips.statistics())
    model.normalizer.load_state_dict(dynamics.normalizer.state_dict())
    imagined = imagine_observations(dynamics, clips, model.config, count=40, seed=0)
    assert set(imagined.status.unique().tolist()) == {RUNNING, SUCCESS, FAILED}
    assert imagined.before_end.any()
    assert (imagined.status[imagined.before_end] == RUNNING).all()
    finish(RewardModelFit(model, clips, imagined, seed=0))
    recorded = label_recorded(other, np.arange(len(other)))
    metrics = set_failed_threshold(model, recorded)
    assert metrics["success_auc"] > 0.95
    assert metrics["failed_auc"] > 0.95
    first = model.encode(recorded.first, recorded.first_state, recorded.instruction)
    status = model.classify(first, recorded.images, recorded.state, recorded.instruction, strict=False)
    assert not (status.success & status.failed).any()
    assert (status.success == (recorded.status == SUCCESS)).float().mean() > 0.9


def test_goals_are_learned_from_successes_alone(tmp_path: Path) -> None:
    """Where a failure ended is no goal."""
    clips = ClipSampler([dot_episodes.store(tmp_path / "dots", 40)], action_horizon=H)
    dynamics, model = dot_episodes.models()
    model.config = dataclasses.replace(model.config, shift=0)
    fit = RewardModelFit(model, clips, imagine_observations(dynamics, clips, model.config, count=4, seed=0), seed=0)
    index = np.arange(len(clips))
    _, won = clips.episode_ends(index)
    won_alone, all_of_them, lost_alone = (
        fit.loss(label_recorded(clips, part))[1]["goal_error"]
        for part in (index[won.numpy()], index, index[~won.numpy()])
    )
    assert won_alone > 0
    assert all_of_them == pytest.approx(won_alone)
    assert lost_alone == 0


def test_a_resumed_fit_is_the_same_fit(tmp_path: Path) -> None:
    clips = ClipSampler([dot_episodes.store(tmp_path / "dots", 40)], action_horizon=H)

    def fit() -> RewardModelFit:
        torch.manual_seed(4)
        dynamics, model = dot_episodes.models()
        imagined = imagine_observations(dynamics, clips, model.config, count=4, seed=0)
        return RewardModelFit(model, clips, imagined, seed=0)

    whole, first = fit(), fit()
    for _ in range(4):
        whole.update()
    first = fit()
    for _ in range(2):
        first.update()
    save_tree(tmp_path / "state", first.state_dict())
    second = fit()
    torch.manual_seed(99)
    second.load_state_dict(load_tree(tmp_path / "state"))
    for _ in range(2):
        second.update()
    for name, value in whole.model.state_dict().items():
        assert torch.equal(value, second.model.state_dict()[name]), name


def test_too_few_successes_are_refused(tmp_path: Path) -> None:
    clips = ClipSampler([dot_episodes.store(tmp_path / "dots", 3)], action_horizon=H)
    dynamics, model = dot_episodes.models()
    imagined = imagine_observations(dynamics, clips, model.config, count=4, seed=0)
    model.config = dataclasses.replace(model.config, min_successes=4)
    with pytest.raises(WorldModelError, match=r"the episodes hold \d successes, a reward needs at least 4"):
        RewardModelFit(model, clips, imagined, seed=0)


def test_successes_that_only_people_know_of_are_successes(tmp_path: Path) -> None:
    """As on an arm: nothing is recorded as a success, and no episode ends by itself."""
    store = EpisodeStore(tmp_path, create=True)
    for seed in range(10):
        recorded = dot_episodes.episode(seed, steps=4)
        no = np.zeros(recorded.num_steps, dtype=bool)
        id = store.add(dataclasses.replace(recorded, success=no, terminated=no))
        store.label(id, "success", seed % 2 == 0, author="anna")
    clips = ClipSampler([store], action_horizon=H)
    config = dataclasses.replace(dot_episodes.REWARD_MODEL, min_successes=5)
    labeled = label_recorded(clips, success_observations(clips, config))
    assert labeled.status.tolist() == [SUCCESS] * 5
    assert labeled.success.all()
    assert torch.equal(labeled.state, labeled.end_state)


def test_a_success_of_many_observations_is_one(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    id = store.add(dot_episodes.episode(0, steps=8))
    store.label(id, "success", True, author="anna")
    store.label(id, "success_from", 1, author="anna")
    clips, config = ClipSampler([store], action_horizon=H), dot_episodes.REWARD_MODEL
    assert len(success_observations(clips, dataclasses.replace(config, min_successes=1))) == 8
    with pytest.raises(WorldModelError, match="the episodes hold 1 successes, a reward needs at least 2"):
        success_observations(clips, dataclasses.replace(config, min_successes=2))


def test_a_false_success_trains_as_none(tmp_path: Path) -> None:
    store = dot_episodes.store(tmp_path, 40)
    false = [entry.id for entry in store.select() if entry.success][::2]
    for id in false:
        store.label(id, "success", False, author="anna")
    clips = ClipSampler([store], action_horizon=H)
    dynamics, model = dot_episodes.models()
    dynamics.fit_scales(*clips.statistics())
    imagined = imagine_observations(dynamics, clips, model.config, count=40, seed=0)
    for examples in (imagined, label_recorded(clips, clips.with_status(SUCCESS))):
        assert (examples.status == SUCCESS).any()
        assert examples.success[examples.status == SUCCESS].all()


def test_nothing_within_a_labelled_success_is_predicted_as_running(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    for seed in range(4):
        store.label(store.add(dot_episodes.episode(seed, steps=8)), "success", True, author="anna")
    for entry in store.select():
        store.label(entry.id, "success_from", 1, author="anna")
    clips = ClipSampler([store], action_horizon=H)
    dynamics, model = dot_episodes.models()
    dynamics.fit_scales(*clips.statistics())
    imagined = imagine_observations(dynamics, clips, model.config, count=20, seed=0)
    assert set(imagined.status.tolist()) == {SUCCESS}
    assert not imagined.before_end.any()


def test_a_policy_of_another_robot_is_refused() -> None:
    dynamics, model = dot_episodes.models()
    info = WorldModelInfo(
        dynamics=dynamics.config,
        reward_model=model.config,
        robot=dot_episodes.ROBOT,
        reference_error=1.0,
        metrics={},
        reward_every=1,
    )
    check_robot(info, dot_episodes.ROBOT, what="the policy p")
    other = dataclasses.replace(dot_episodes.ROBOT, cameras=("front",))
    with pytest.raises(
        WorldModelError,
        match=r"the policy p does not fit the world model: cameras \('front',\), not \('front', 'flipped'\); fit",
    ):
        check_robot(info, other, what="the policy p")


def policy_with(config: CompactEncoderConfig) -> HasCompactEncoder:
    policy = HasCompactEncoder()
    policy.encoder = CompactEncoder(config, cameras=2, image_size=(64, 64), state_dim=2)
    policy.forecast = Forecast(config, pooled_width=policy.encoder.pooled_width, state_dim=2)
    policy.normalizer = Normalizer(state_dim=2, action_dim=2)
    return policy


def test_it_starts_from_an_encoder_of_the_same_settings_and_ignores_others() -> None:
    _, model = dot_episodes.models()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    wider = dataclasses.replace(dot_episodes.ENCODER, width=64)
    for other in (None, SimpleNamespace(), policy_with(wider)):
        assert not model.start_from(other)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    torch.manual_seed(7)
    policy = policy_with(dot_episodes.ENCODER)
    assert model.start_from(policy)
    for own, other in ((model.encoder, policy.encoder), (model.forecast, policy.forecast)):
        for name, value in own.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name


def test_a_frozen_encoder_is_that_of_the_policy_after_the_fit(tmp_path: Path) -> None:
    world, model = dot_episodes.models()
    clips = ClipSampler([dot_episodes.store(tmp_path, 20)], action_horizon=4)
    world.fit_scales(*clips.statistics())
    config = dataclasses.replace(model.config, frozen_encoder=True, steps=3)
    model = RewardModel(config, dot_episodes.ROBOT)
    wider = policy_with(dataclasses.replace(dot_episodes.ENCODER, width=64))
    for other in (None, SimpleNamespace(), wider):
        with pytest.raises(
            ValueError, match="frozen_encoder needs a policy with a compact encoder of the same settings"
        ):
            model.start_from(other)
    policy = policy_with(dot_episodes.ENCODER)
    policy.normalizer.fit(*clips.statistics()[:2])
    assert model.start_from(policy)
    head = model.head[0].weight.detach().clone()
    imagined = imagine_observations(world, clips, config, count=4, seed=0)
    dot_episodes.finish(RewardModelFit(model, clips, imagined, seed=0))
    assert not torch.equal(model.head[0].weight, head)
    for name, value in model.encoder.state_dict().items():
        assert torch.equal(value, policy.encoder.state_dict()[name]), name
