"""Clips hold recorded observations, the actions between them, and what followed."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from episodes.overlays import LabelValue
from episodes.store import EpisodeStore
from sims.vector_env import StartState
from tests import dot_episodes
from tests.episodes.episode_examples import make_episode
from world_models.data.clip import FAILED, RUNNING, SUCCESS, Part, part_of
from world_models.data.clip_sampler import ClipSampler
from world_models.data.keyframes import KeyframeConfig, Keyframes
from world_models.world_model import WorldModelError

H = dot_episodes.HORIZON


@pytest.fixture
def clips(tmp_path: Path) -> ClipSampler:
    return ClipSampler([dot_episodes.store(tmp_path / "store", 12)], action_horizon=H)


def test_a_clip_is_as_recorded(clips: ClipSampler) -> None:
    clip = clips.clip(2, 5, 2)
    episode = clips.entries[2]
    assert clip.length.tolist() == [H, min(H, episode.steps - 5 - H)]
    assert clip.past_length == H
    actions = clips.actions(2)
    torch.testing.assert_close(clip.action[0], actions[5 : 5 + H])
    torch.testing.assert_close(clip.past_action, actions[5 - H : 5])
    # position moves by twice the first action, and the frames show the positions
    torch.testing.assert_close(clip.state[1, 0] - clip.state[0, 0], 2 * clip.action[0, :, 0].sum())
    for frame, state in zip(clip.frames, clip.state, strict=True):
        assert np.array_equal(frame.numpy(), dot_episodes.image_of(float(state[0])))
    assert np.array_equal(clip.first.numpy(), dot_episodes.image_of(5.0 + 2))
    assert np.array_equal(clip.previous.numpy(), dot_episodes.image_of(float(clip.previous_state[0])))


def test_clips_are_padded_after_an_episodes_end(clips: ClipSampler) -> None:
    last = len(clips.observation_steps(0)) - 2
    clip = clips.clip(0, last, 3)
    assert clip.length.tolist() == [1, 0, 0]
    assert (clip.action[1:] == 0).all()
    assert torch.equal(clip.frames[1], clip.frames[3])


def test_status_is_as_recorded(clips: ClipSampler) -> None:
    for status, count in (
        (SUCCESS, sum(entry.success for entry in clips.entries)),
        (FAILED, sum(_failed(clips, i) for i in range(12))),
    ):
        assert len(clips.with_status(status)) == count > 0
    near_end = clips.observations(clips.running_near_end(within=3))
    assert (near_end.status == RUNNING).all()


@pytest.mark.parametrize(
    ("recorded", "labels", "status"),
    [
        (True, {}, [RUNNING, RUNNING, RUNNING, SUCCESS]),
        (True, {"success": True}, [RUNNING, RUNNING, RUNNING, SUCCESS]),
        (True, {"success": False}, [RUNNING, RUNNING, RUNNING, FAILED]),
        (True, {"outcome": "abort"}, [RUNNING, RUNNING, RUNNING, RUNNING]),
        (True, {"success_from": 4}, [RUNNING, RUNNING, SUCCESS, SUCCESS]),
        (True, {"success_from": 4, "success": False}, [RUNNING, RUNNING, RUNNING, FAILED]),
        (False, {}, [RUNNING, RUNNING, RUNNING, RUNNING]),
        (False, {"success": True}, [RUNNING, RUNNING, RUNNING, SUCCESS]),
        (False, {"success": True, "success_from": 2}, [RUNNING, SUCCESS, SUCCESS, SUCCESS]),
        (False, {"success_from": 2}, [RUNNING, SUCCESS, SUCCESS, SUCCESS]),  # as for success classifiers
        (False, {"success": False}, [RUNNING, RUNNING, RUNNING, RUNNING]),
    ],
)
def test_status_is_as_labelled(
    recorded: bool, labels: dict[str, LabelValue], status: list[int], tmp_path: Path
) -> None:
    store = EpisodeStore(tmp_path, create=True)
    last = np.arange(6) == 5
    id = store.add(
        make_episode(
            steps=6, every=2, success=last & recorded, terminated=last & recorded, truncated=last & (not recorded)
        )
    )
    for key, value in labels.items():
        store.label(id, key, value, author="anna")
    clips = ClipSampler([store], action_horizon=H)
    assert clips.observations(np.arange(4)).status.tolist() == status
    assert clips.entries[0].success == (SUCCESS in status)
    assert clips.outcome(0) == (None if "outcome" in labels else SUCCESS in status)


def test_success_from_counts_recorded_steps_of_a_trimmed_episode(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    id = store.add(make_episode(steps=6))
    store.label(id, "success_from", 4, author="anna")
    store.trim(id, 2, 6, author="anna")
    clips = ClipSampler([store], action_horizon=H)
    assert clips.observations(np.arange(5)).status.tolist() == [RUNNING, RUNNING, SUCCESS, SUCCESS, SUCCESS]
    assert clips.undecided_steps(0) == 2
    assert clips.undecided_from(np.arange(5)).tolist() == [2, 1, 0, -1, -2]


def test_a_success_that_is_cut_off_is_shown_nowhere(tmp_path: Path) -> None:
    """It counts as one until somebody labels it, but none of its observations shows it."""
    store = EpisodeStore(tmp_path, create=True)
    store.split(store.add(make_episode(steps=6)), 3, author="anna")
    clips = ClipSampler([store], action_horizon=H)
    assert clips.with_status(SUCCESS).tolist() == [7]
    assert [entry.success for entry in clips.entries] == [True, True]
    assert [clips.outcome(part) for part in range(2)] == [False, True]
    _, shown = clips.episode_ends(np.arange(8))
    assert shown.tolist() == [False] * 4 + [True] * 4


def test_running_near_an_end_is_before_a_labelled_success(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    store.label(store.add(make_episode(steps=8)), "success_from", 4, author="anna")
    assert ClipSampler([store], action_horizon=H).running_near_end(within=2).tolist() == [2, 3]


@pytest.mark.parametrize("won", [[0, 0, 1, 1, 1, 1], [0, 0, 1, 0, 1, 1]])
def test_a_recorded_success_lasts_and_is_decided_at_its_first_step(won: list[int], tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    store.add(make_episode(steps=6, success=np.array(won, dtype=bool)))
    clips = ClipSampler([store], action_horizon=H)
    assert clips.observations(np.arange(7)).status.tolist() == [RUNNING] * 3 + [SUCCESS] * 4
    assert clips.undecided_steps(0) == 3
    assert clips.running_near_end(within=1).tolist() == [2]
    keyframes = Keyframes(clips, KeyframeConfig(episode_starts=0.0, before_end=(1, 9)), tasks=("push",))
    assert {keyframes.choose(StartState(task=0, seed=seed)) for seed in range(50)} == {(0, 1), (0, 2)}


def test_outcomes_tell_what_labels_change(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    id = store.add(make_episode(steps=6))
    told = [ClipSampler([store], action_horizon=H).outcomes()]
    assert told == [f"{id} True\n"]
    for key, value in (("success_from", 4), ("success_from", 5), ("outcome", "abort"), ("success", False)):
        store.label(id, key, value, author="anna")
        told.append(ClipSampler([store], action_horizon=H).outcomes())
    assert len(set(told)) == 5


def test_outcomes_tell_what_is_trimmed(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    id = store.add(make_episode(steps=6))
    told = [ClipSampler([store], action_horizon=H).outcomes()]
    for end in (6, 5):
        store.trim(id, 1, end, author="anna")
        told.append(ClipSampler([store], action_horizon=H).outcomes())
    assert told == [f"{id} True\n", f"{id} (1, 6) True\n", f"{id} (2, 6) True\n"]


def _failed(clips: ClipSampler, episode: int) -> bool:
    return float(clips.clip(episode, len(clips.observation_steps(episode)) - 1, 0).state[0, 0]) < 1


def test_random_clips_have_every_length(clips: ClipSampler) -> None:
    clip = clips.draw(np.random.default_rng(0), 200, 1)
    assert set(clip.length.unique().tolist()) == set(range(1, H + 1))
    near = clips.draw_near_ends(np.random.default_rng(0), 50, 2, within=3)
    assert (near.length.sum(1) <= 3).all()


def test_one_observation_per_chunk_is_enough_and_fewer_are_refused(tmp_path: Path) -> None:
    chunked = ClipSampler([dot_episodes.store(tmp_path / "chunked", 4, every=H)], action_horizon=H)
    assert chunked.clip(0, 1, 1).past_length == H
    with pytest.raises(WorldModelError, match=f"observations are up to {H} control steps apart"):
        ClipSampler([EpisodeStore(tmp_path / "chunked")], action_horizon=H - 1)


@pytest.mark.parametrize("every", [1, 2, 3, 4])
def test_observations_that_are_hardly_ever_a_chunk_apart_are_refused(every: int, tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    store.add_all(dot_episodes.episode(seed, every=every, steps=60) for seed in range(20))
    clips = ClipSampler([store], action_horizon=H)
    full = (clips.draw(np.random.default_rng(0), 400, 1).length == H).float().mean()
    if every == 3:
        assert full < 0.1
        with pytest.raises(WorldModelError, match=r"are followed by one 4 .* an observe_every that divides 4"):
            clips.check_full_gaps()
    else:
        assert full > 0.4
        clips.check_full_gaps()


def test_episodes_shorter_than_a_chunk_are_not_refused(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    store.add_all(dot_episodes.episode(seed, steps=H - 1) for seed in range(3))
    ClipSampler([store], action_horizon=H).check_full_gaps()


def test_no_start_is_in_two_parts(tmp_path: Path) -> None:
    stores = [dot_episodes.store(tmp_path / "a", 40), dot_episodes.store(tmp_path / "b", 40)]
    names: tuple[Part, ...] = ("fit", "calibration", "held_out")
    parts = {part: ClipSampler(stores, action_horizon=H, part=part) for part in names}
    seeds = {part: {entry.seed for entry in clips.entries} for part, clips in parts.items()}
    assert len(set.union(*seeds.values())) == sum(map(len, seeds.values())) == 40
    assert sum(len(clips.entries) for clips in parts.values()) == 80
    assert all(part_of(entry) == part for part in names for entry in parts[part].entries)


def test_an_episode_of_two_stores_counts_once(tmp_path: Path) -> None:
    store, other = dot_episodes.store(tmp_path / "store", 3), dot_episodes.store(tmp_path / "other", 2)
    shutil.copy(store.file(store.entries()[0].id), other.path)
    clips = ClipSampler([store, EpisodeStore(other.path), store], action_horizon=H)
    assert [entry.seed for entry in clips.entries] == [0, 1, 2, 0, 1]
    assert len(clips) == sum(entry.steps for entry in clips.entries)


def test_wrong_episodes_are_refused(tmp_path: Path) -> None:
    store = dot_episodes.store(tmp_path / "store", 2)
    with pytest.raises(WorldModelError, match="no camera 'side'; recorded are front, flipped"):
        ClipSampler([store], action_horizon=H, cameras=("side",))
    other = dot_episodes.episode(5)
    blind = dot_episodes.store(tmp_path / "blind", 0)
    blind.add(dataclasses.replace(other, images={}))
    with pytest.raises(WorldModelError, match="recorded without images; a world model needs them"):
        ClipSampler([blind], action_horizon=H)
    wide = np.concatenate([other.action, other.action], axis=1)
    store.add(dataclasses.replace(other, action=wide))
    with pytest.raises(WorldModelError, match="4 action dimensions, the other episodes have 2"):
        ClipSampler([store], action_horizon=H)
    mixed = dot_episodes.store(tmp_path / "mixed", 1)
    mixed.add(dataclasses.replace(dot_episodes.episode(6), control_hz=50.0))
    with pytest.raises(WorldModelError, match=r"50\.0 Hz, the other episodes have 10\.0 Hz"):
        ClipSampler([mixed], action_horizon=H)
    empty = EpisodeStore(tmp_path / "empty", create=True)
    with pytest.raises(WorldModelError, match="empty: no episodes; record some"):
        ClipSampler([empty], action_horizon=H)
