"""Progress models: what they are fitted to, that they learn it, and that a resumed fit is the same."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from episodes.sampler import WindowSampler
from episodes.schema import POLICY, Episode, EpisodeError
from episodes.store import EpisodeStore
from policies.bundle import load_bundle
from policies.gaussian import GaussianPolicyConfig
from policies.registry import build_policy
from sims.vector_env import Observation
from tests import dot_episodes
from tests.rewards.continuation import check_fit_resumes
from tests.rewards.small_classifier import ENCODER
from vla_rl.algorithms.bc import BCConfig
from vla_rl.config.loader import load_config
from vla_rl.config.packaged import find_config
from vla_rl.rewards.bundle import PROGRESS, load_reward_model, save_reward_model
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.progress.assessment import rank_correlation
from vla_rl.rewards.progress.fit import ProgressFit
from vla_rl.rewards.progress.model import ProgressConfig, ProgressModel, progress_targets
from vla_rl.rewards.progress.weights import progress_changes, progress_weights
from vla_rl.rewards.scorer import RewardModelError, Sensors
from vla_rl.runners.imitation import CloningSource, clone
from vla_rl.runners.progress import assess_progress_stores, fit_progress

SENSORS = Sensors(cameras=("front", "flipped"), image_size=(16, 16), state_dim=2)
SMALL = ProgressConfig(encoder=ENCODER, steps=150, batch_size=32, learning_rate=3e-3, shift=1)


def success(seed: int, grips: list[int], *, steps: int, instruction: str = "go right") -> Episode:
    """Straight to the right edge; ``grips``: the second action's sign changes at these control steps."""
    changes = np.isin(np.arange(steps), grips).cumsum()
    sideways = np.full(steps, (dot_episodes.SIZE - 8) / 2 / steps)
    return driven(seed, np.stack([sideways, 0.5 - changes % 2], axis=1), instruction)


def wavering(seed: int) -> Episode:
    """Goes back nearly as often as it gets on."""
    back = np.concatenate([np.random.default_rng(seed + i).permutation(2) for i in range(20)])
    return driven(seed, np.stack([np.where(back, -0.6, 0.7), np.zeros(40)], axis=1), "go right")


def driven(seed: int, action: np.ndarray, instruction: str) -> Episode:
    """By these actions; succeeds at its last step."""
    steps = len(action)
    last = np.arange(steps) == steps - 1
    positions = 5 + np.concatenate([[0], 2 * action[:, 0].cumsum()])
    images = np.stack([dot_episodes.image_of(float(position)) for position in positions])
    return dataclasses.replace(
        dot_episodes.episode(seed, instruction=instruction),
        images={"front": images[:, 0], "flipped": images[:, 1]},
        observation_steps=np.arange(steps + 1, dtype=np.int32),
        state=np.stack([positions, 0 * positions], axis=1).astype(np.float32),
        action=action.astype(np.float32),
        reward=last.astype(np.float32),
        terminated=last,
        truncated=np.zeros(steps, dtype=bool),
        success=last,
        actor=np.full(steps, POLICY, dtype=np.uint8),
    )


def recorded_of(folder: Path, episodes: list[Episode]) -> LabeledEpisodes:
    store = EpisodeStore(folder, create=True)
    store.add_all(episodes)
    return LabeledEpisodes([store])


def test_without_stages_progress_is_the_share_of_the_time(tmp_path: Path) -> None:
    failure = dot_episodes.episode(3, drift=-0.9)
    recorded = recorded_of(tmp_path, [success(0, [], steps=10), failure])
    targets = progress_targets(recorded, ProgressConfig())
    won = recorded.succeeded[recorded.episode]
    np.testing.assert_allclose(targets[won], np.arange(11) / 10, atol=1e-6)
    assert np.isnan(targets[~won]).all()


def test_stages_end_where_the_gripper_changes_and_have_their_mean_shares(tmp_path: Path) -> None:
    """Shares .2, .8 and .6, .4: the first stage ends at .4 in both, however long it took."""
    recorded = recorded_of(tmp_path, [success(0, [2], steps=10), success(1, [6], steps=10), success(2, [], steps=10)])
    targets = progress_targets(recorded, ProgressConfig(gripper=1))
    by_seed = {recorded.entries[i].seed: targets[recorded.episode == i] for i in range(3)}
    np.testing.assert_allclose(by_seed[0], [0, 0.2, *np.linspace(0.4, 1, 9)], atol=1e-6)
    np.testing.assert_allclose(by_seed[1], [*np.linspace(0, 0.4, 7), 0.55, 0.7, 0.85, 1], atol=1e-6)
    np.testing.assert_allclose(by_seed[2], np.arange(11) / 10, atol=1e-6)  # another number of stages: of the time
    with pytest.raises(RewardModelError, match="gripper is 2, but actions have 2 dimensions"):
        progress_targets(recorded, ProgressConfig(gripper=2))


def test_progress_as_the_share_of_complete_stages(tmp_path: Path) -> None:
    """The gripper changes at step 2; the dot stands still from the observation at 5 on to that at 7."""
    action = np.stack([[1, 1, 1, 1, 1, 0, 0, 1, 1, 1], [0.5, 0.5, *[-0.5] * 8]], axis=1) * 0.4
    recorded = recorded_of(tmp_path, [driven(0, action, "go right"), success(1, [], steps=10)])
    config = ProgressConfig(gripper=1, position=(0, 1), target="stages")
    targets = progress_targets(recorded, config)
    by_seed = {recorded.entries[i].seed: targets[recorded.episode == i] for i in range(2)}
    np.testing.assert_allclose(by_seed[0], [0, 0, *[1 / 3] * 3, *[2 / 3] * 5, 1], atol=1e-6)
    np.testing.assert_allclose(by_seed[1], [*[0] * 10, 1])  # success alone
    with pytest.raises(RewardModelError, match="position is 2, but states have 2 dimensions"):
        progress_targets(recorded, ProgressConfig(position=(0, 2)))


def test_the_packaged_process_reward() -> None:
    config = load_config(ProgressConfig, find_config(Path("tabletop_process"), "rewards"), ())
    assert (config.target, config.gripper, config.position) == ("stages", 6, (0, 1, 2))
    assert config.backbone == "tabletop" and not config.train_encoder


def store_of(folder: Path, *, first: int = 0) -> Path:
    """Two instructions: to the right as usual, and of the same images "go left", which never succeeds."""
    with EpisodeStore(folder, create=True) as store:
        store.add_all(success(seed, [], steps=8 + seed % 5) for seed in range(first, first + 20))
        other = [success(1000 + seed, [], steps=9, instruction="wait there") for seed in range(first, first + 20)]
        store.add_all(dataclasses.replace(episode, task="wait") for episode in other)
        store.add_all(dot_episodes.episode(2000 + seed, drift=-0.9) for seed in range(first, first + 10))
    return folder


def test_a_fitted_model_orders_other_episodes_and_tells_failures(tmp_path: Path) -> None:
    alike = dataclasses.replace(SMALL, other_instructions=0.0)
    report = fit_progress(alike, [store_of(tmp_path / "a")], tmp_path / "progress", seed=0)
    assert report == json.loads((tmp_path / "progress" / "report.json").read_text())
    other = assess_progress_stores(tmp_path / "progress", [store_of(tmp_path / "b", first=500)])
    for found in (report, other):
        assert found["value_order_correlation"] > 0.9
        assert found["error"] < 0.15
        assert found["failure_auc"] > 0.9
        assert found["high_failures"]["value"] < 0.3


def test_with_another_instruction_there_is_no_progress(tmp_path: Path) -> None:
    """The images are those of the other task's success."""
    recorded = LabeledEpisodes([EpisodeStore(store_of(tmp_path / "a"))])
    fit = make_fit(recorded, other_instructions=1.0)
    batch = fit.draw()
    assert (batch.progress == 0).float().mean() > 0.3  # the rest drew their own instruction
    assert (batch.progress > 0).any()


def test_the_same_task_in_other_words_is_progress(tmp_path: Path) -> None:
    """At success nothing is labeled as not done, whatever the wording."""
    wordings = ("go right", "to the right", "move to the right edge")
    episodes = [success(seed, [], steps=8, instruction=wordings[seed % 3]) for seed in range(12)]
    recorded = recorded_of(tmp_path, episodes)
    targets = np.ones(len(recorded), dtype=np.float32)
    model = ProgressModel(dataclasses.replace(SMALL, other_instructions=1.0), recorded.sensors)
    fit = ProgressFit(model, recorded, targets, np.arange(len(recorded)), seed=0)
    assert all((fit.draw().progress == 1).all() for _ in range(4))


def make_fit(recorded: LabeledEpisodes, **changed: float) -> ProgressFit:
    torch.manual_seed(1)
    targets = progress_targets(recorded, ProgressConfig())
    model = ProgressModel(dataclasses.replace(SMALL, steps=6, **changed), SENSORS)  # type: ignore[arg-type]
    return ProgressFit(model, recorded, targets, np.flatnonzero(~np.isnan(targets)), seed=3)


def test_a_resumed_fit_is_the_same_bit_for_bit(tmp_path: Path) -> None:
    recorded = LabeledEpisodes([EpisodeStore(store_of(tmp_path / "a"))])
    check_fit_resumes(lambda: make_fit(recorded))


def test_too_few_successes_and_other_labels_are_one_clear_error(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path / "few", create=True) as store:
        store.add_all(success(seed, [], steps=9) for seed in range(3))
    with pytest.raises(RewardModelError, match="hold 3 successes, min_successes is 10"):
        fit_progress(SMALL, [tmp_path / "few"], tmp_path / "out", seed=0)
    short, path = dataclasses.replace(SMALL, steps=2), store_of(tmp_path / "a")
    fit_progress(short, [path], tmp_path / "out", seed=0)
    with pytest.raises(RewardModelError, match="other settings, episodes or labels"):
        fit_progress(dataclasses.replace(short, gripper=1), [path], tmp_path / "out", seed=0)


def test_without_a_held_out_success_there_is_nothing_to_report(tmp_path: Path) -> None:
    """Two successes of a task are both fitted to where a fifth is held out."""
    with EpisodeStore(tmp_path / "few", create=True) as store:
        tasks = [f"task {i}" for i in range(5)] * 2
        store.add_all(
            dataclasses.replace(success(seed, [], steps=9), task=task) for seed, task in enumerate(tasks, start=1)
        )
    with pytest.raises(RewardModelError, match=r"no success among the held-out starts.*or raise held_out"):
        fit_progress(SMALL, [tmp_path / "few"], tmp_path / "out", seed=0)
    assert not (tmp_path / "out").exists()
    fit_progress(dataclasses.replace(SMALL, steps=2, held_out=0.4), [tmp_path / "few"], tmp_path / "out", seed=0)


def test_what_a_report_cannot_know_is_null(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path / "lost", create=True) as store:
        store.add_all(dot_episodes.episode(seed, drift=-0.9) for seed in range(3))
    save_reward_model(PROGRESS, ProgressModel(SMALL, SENSORS), tmp_path / "out", tasks=("go",))
    report = assess_progress_stores(tmp_path / "out", [tmp_path / "lost"])
    assert [report[name] for name in ("error", "blank_instruction", "failure_auc")] == [None] * 3
    json.dumps(report, allow_nan=False)


def test_a_folder_is_a_model_of_its_own_kind(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ProgressModel(dataclasses.replace(SMALL, backbone=Path("some/file")), SENSORS)
    save_reward_model(PROGRESS, model, tmp_path, tasks=("go",))
    again = load_reward_model(PROGRESS, tmp_path)
    assert again.config == model.config
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    with pytest.raises(RewardModelError, match=r"is not a progress model.*vla-rl reward fit-progress STORE"):
        load_reward_model(PROGRESS, tmp_path / "nothing")


def test_rank_correlation() -> None:
    steps = np.arange(6)
    assert rank_correlation(np.exp(steps.astype(np.float64)), steps) == pytest.approx(1)
    assert rank_correlation(-steps.astype(np.float64), steps) == pytest.approx(-1)
    assert rank_correlation(np.zeros(6), steps) == 0
    assert rank_correlation(np.array([0.0, 2.0, 1.0]), np.arange(3)) == pytest.approx(0.5)


def test_equal_scores_share_their_average_rank() -> None:
    """Ranks 2.5 (four times) and 5: covariance 5 of sums of squares 5 and 10."""
    late, early = np.array([0.0, 0.0, 0.0, 0.0, 1.0]), np.array([1.0] + [0.0] * 9)
    assert rank_correlation(late, np.arange(5)) == pytest.approx(5 / 50**0.5)  # 0.7071
    assert rank_correlation(early, np.arange(10)) == pytest.approx(-0.5222, abs=1e-4)


# -- cloning by progress ----------------------------------------------------------------------------------------------


class Position:
    """The dot's place as progress; the images are not looked at."""

    device = torch.device("cpu")

    def cameras_among(self, sensors: Sensors, where: str) -> list[int]:
        assert sensors == SENSORS, where
        return [0]

    def progress(self, obs: Observation) -> torch.Tensor:
        return obs.state[:, 0] / dot_episodes.SIZE


def test_windows_count_by_the_progress_in_them(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    store.add_all(dot_episodes.episode(seed, every=2, drift=drift) for seed, drift in enumerate([0.5, 0.0, -0.6] * 2))
    sampler = WindowSampler(store, action_horizon=4, batch_size=8, seed=0)
    change = progress_changes(sampler, Position())
    every = np.arange(len(sampler))
    before = sampler.windows(every)
    later = sampler.observed(sampler.ahead(every, 4))
    torch.testing.assert_close(change, (later.state - before.obs.state)[:, 0] / dot_episodes.SIZE)
    moved = 2 * (before.targets.action[..., 0] * before.targets.mask).sum(1) / dot_episodes.SIZE
    torch.testing.assert_close(change, moved, atol=1e-5, rtol=0)  # what the actions of the window did
    sampler.weigh(progress_weights(change))
    mask = sampler.windows(every).targets.mask
    torch.testing.assert_close(mask, before.targets.mask * progress_weights(change)[:, None])
    assert (mask[change < 0] == 0).all()
    assert (mask[change > 0.01] == before.targets.mask[change > 0.01]).all()
    with pytest.raises(EpisodeError, match="got 3 weights for"):
        sampler.weigh(torch.ones(3))


def test_the_weights_of_small_changes_lie_between() -> None:
    change = torch.tensor([-0.02, 0.0, 0.004, 0.009, 0.02])
    mean, spread = 0.0026, change.std(correction=0)
    expected = [0.0, *(((d - (mean - 2 * spread)) / (4 * spread)).item() for d in (0.0, 0.004, 0.009)), 1.0]
    torch.testing.assert_close(progress_weights(change), torch.tensor(expected))


def test_a_policy_is_cloned_from_what_gets_on(tmp_path: Path) -> None:
    """Cloned alike it nearly stands still."""
    fit_progress(
        dataclasses.replace(SMALL, other_instructions=0.0), [store_of(tmp_path / "a")], tmp_path / "progress", seed=0
    )
    with EpisodeStore(tmp_path / "b", create=True) as store:
        store.add_all(wavering(seed) for seed in range(12))
    means = []
    for progress in (None, tmp_path / "progress"):
        policy = build_policy(GaussianPolicyConfig(action_horizon=1, hidden=(32,)), dot_episodes.ROBOT)
        config = BCConfig(steps=150, batch_size=64, learning_rate=3e-3, progress=progress)
        folder = tmp_path / f"cloned-{progress is not None}"
        bundle = clone(policy, [CloningSource(store=tmp_path / "b")], config, folder, seed=0, fit_normalizer=True)
        cloned = load_bundle(bundle)
        obs = WindowSampler(store, action_horizon=1, batch_size=64, seed=0).next_batch().obs
        context, _ = cloned.encode(obs, cloned.initial_state(len(obs)))
        means.append(cloned.act(context, torch.Generator().manual_seed(0))[..., 0].mean().item())
    assert means[0] < 0.2
    assert means[1] > 0.5
