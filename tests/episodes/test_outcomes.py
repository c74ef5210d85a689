"""Rewards and ends of episodes as they are labelled: those of the steps, also of parts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from episodes.outcomes.rewards import rewarded, with_outcome
from episodes.store import EpisodeStore
from tests.episodes.episode_examples import make_episode
from vla_rl.replay.demonstrations import chunk_sequences
from vla_rl.rewards.labels import LabeledEpisodes


def failed() -> dict[str, np.ndarray]:
    last, none = np.arange(10) == 9, np.zeros(10, dtype=bool)
    return {"reward": none.astype(np.float32), "success": none, "terminated": none, "truncated": last}


def test_a_success_that_begins_in_the_second_part_pays_nothing_in_the_first(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    id = store.add(make_episode(steps=10, **failed()))
    store.label(id, "success", True, author="a")
    store.label(id, "success_from", 8, author="a")
    store.split(id, 5, author="a")
    first, second = store.select()
    assert first.success and second.success  # both are good behavior
    found = [rewarded(store, entry) for entry in (first, second)]
    assert [episode.reward.tolist() for episode in found] == [[0, 0, 0, 0, 0], [0, 0, 1, 0, 0]]
    assert [episode.terminated.any() for episode in found] == [False, True]
    assert not found[0].truncated.any()  # it goes on: what it is worth is not known
    chunks, *_ = chunk_sequences(found[1], action_horizon=5, gamma=0.5)  # ends with the success at its third step
    assert (chunks.num_executed.tolist(), chunks.reward.tolist(), chunks.terminated.tolist()) == ([3], [0.25], [True])


@pytest.mark.parametrize("parts", [(5,), (5, 7)])
def test_a_success_that_was_labelled_at_the_end_shows_in_the_last_part_alone(
    tmp_path: Path, parts: tuple[int, ...]
) -> None:
    store = EpisodeStore(tmp_path, create=True)
    id = store.add(make_episode(steps=10, **failed()))
    store.label(id, "success", True, author="a")
    for at in parts:
        id, before = store.select()[-1].id, store.select()[-1].span
        store.split(id, at - (before[0] if before else 0), author="a")
    *earlier, last = store.select()
    assert rewarded(store, last).reward.tolist() == [0.0] * (last.steps - 1) + [1.0]
    assert not any(rewarded(store, entry).reward.any() for entry in earlier)
    shown = LabeledEpisodes([store])
    assert shown.succeeded.tolist() == [False] * len(earlier) + [True]
    store.label(earlier[0].id, "success", True, author="a")  # of its own: at its end
    assert rewarded(store, earlier[0]).reward.tolist() == [0, 0, 0, 0, 1]
    assert LabeledEpisodes([store]).succeeded[0]


def test_parts_of_a_recorded_success_are_paid_alike_in_training_and_in_learning_from_corrections(
    tmp_path: Path,
) -> None:
    store = EpisodeStore(tmp_path, create=True)
    store.split(store.add(make_episode(steps=10)), 5, author="a")
    for read in (rewarded, with_outcome):
        found = [read(store, entry) for entry in store.select()]
        assert [episode.reward.tolist() for episode in found] == [[0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]
        assert [bool(episode.terminated[-1]) for episode in found] == [False, True]


def test_where_success_begins_is_enough_to_count_as_one(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path, create=True)
    store.label(store.add(make_episode(steps=10, **failed())), "success_from", 8, author="a")
    (entry,) = store.select()
    assert entry.success
    assert rewarded(store, entry).reward.tolist() == [0] * 7 + [1, 0, 0]
