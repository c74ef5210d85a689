"""Which recorded observations show success, and which episodes the threshold is chosen on."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from episodes.schema import Episode
from episodes.store import EpisodeStore
from tests.episodes.episode_examples import make_episode
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.scorer import RewardModelError


def store_of(path: Path, *episodes: Episode) -> EpisodeStore:
    store = EpisodeStore(path, create=True)
    store.add_all(episodes)
    return store


def failed(**changes: object) -> Episode:
    steps = 6
    flags = {name: np.zeros(steps, dtype=bool) for name in ("success", "terminated")}
    return make_episode(steps=steps, truncated=np.arange(steps) == steps - 1, **flags, **changes)


def test_an_episode_that_two_stores_hold_counts_once_as_in_the_first(tmp_path: Path) -> None:
    first = store_of(tmp_path / "first", make_episode(seed=0), failed(seed=1))
    shutil.copytree(first.path, tmp_path / "second")
    second = EpisodeStore(tmp_path / "second")
    second.add(failed(seed=2))
    second.label(first.select()[0].id, "success", False, author="a")
    recorded = LabeledEpisodes([first, second])
    assert [entry.seed for entry in recorded.entries] == [0, 1, 2]
    assert recorded.succeeded.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("success_steps", "early_steps", "success", "unclear"),
    [
        (0, 0, [0, 0, 0, 1], [0, 0, 0, 0]),
        (2, 0, [0, 0, 1, 1], [0, 0, 0, 0]),
        (3, 0, [0, 0, 1, 1], [0, 0, 0, 0]),
        (0, 3, [0, 0, 0, 1], [0, 0, 1, 0]),
        (2, 2, [0, 0, 1, 1], [0, 1, 0, 0]),
        (100, 0, [0, 1, 1, 1], [0, 0, 0, 0]),  # the first observation is before every action
    ],
)
def test_labels_of_a_success_at_its_last_step(
    success_steps: int, early_steps: int, success: list[int], unclear: list[int], tmp_path: Path
) -> None:
    store = store_of(tmp_path, make_episode(steps=6, every=2))
    recorded = LabeledEpisodes([store], success_steps=success_steps, early_steps=early_steps)
    assert recorded.step.tolist() == [0, 2, 4, 6]
    assert recorded.success.astype(int).tolist() == success
    assert recorded.unclear.astype(int).tolist() == unclear


def test_labels_of_people_count(tmp_path: Path) -> None:
    store = store_of(tmp_path, *(make_episode(seed=seed) for seed in range(2)), *(failed(seed=s) for s in (2, 3, 4)))
    ids = [entry.id for entry in store.select()]
    store.label(ids[0], "success", False, author="a")  # the recorded success was none
    store.label(ids[2], "success", True, author="a")  # the recorded failure was a success
    store.label(ids[3], "success_from", 2, author="a")
    recorded = LabeledEpisodes([store])
    shown = [recorded.step[(recorded.episode == e) & recorded.success].tolist() for e in range(5)]
    assert shown == [[], [6], [6], [2, 3, 4, 5, 6], []]
    assert recorded.succeeded.tolist() == [False, True, True, True, False]


@pytest.mark.parametrize(("key", "value"), [("outcome", "abort"), ("rewound_at", 3)])
def test_an_episode_of_unknown_outcome_is_no_failure(key: str, value: str | int, tmp_path: Path) -> None:
    store = store_of(tmp_path, *(make_episode(seed=seed) for seed in range(3)))
    first, second, _ = (entry.id for entry in store.select())
    store.label(first, key, value, author="a")
    recorded = LabeledEpisodes([store])
    assert [entry.seed for entry in recorded.entries] == [1, 2]
    store.label(first, "success", False, author="a")  # somebody says what it is
    assert LabeledEpisodes([store]).succeeded.tolist() == [False, True, True]
    for id in (first, second):
        store.label(id, "deleted", True, author="a")
    store.label(store.select()[0].id, key, value, author="a")
    with pytest.raises(RewardModelError, match="aborted and rewound ones count once they are labelled"):
        LabeledEpisodes([store])


def test_labels_count_recorded_steps_of_a_trimmed_episode_too(tmp_path: Path) -> None:
    store = store_of(tmp_path, failed())
    (entry,) = store.select()
    store.label(entry.id, "success_from", 4, author="a")
    store.trim(entry.id, 2, 6, author="a")
    recorded = LabeledEpisodes([store])
    assert recorded.step.tolist() == [0, 1, 2, 3, 4]
    assert recorded.success.tolist() == [False, False, True, True, True]


def test_the_images_are_those_of_the_chosen_camera(tmp_path: Path) -> None:
    recorded = LabeledEpisodes([store_of(tmp_path, make_episode(steps=6, every=2, seed=5))], cameras=("wrist",))
    read = recorded.read(np.array([3, 1]))
    assert read.obs.images.shape == (2, 1, 8, 8, 3)
    assert read.obs.images[:, 0, 0, 0, 0].tolist() == [106, 102]
    assert read.obs.state[:, :2].tolist() == [[5.0, 6.0], [5.0, 2.0]]
    assert read.success.tolist() == [True, False]


def test_another_camera_or_size_is_one_clear_error(tmp_path: Path) -> None:
    store = store_of(tmp_path, make_episode())
    with pytest.raises(RewardModelError, match="no camera 'side'; recorded are front, wrist"):
        LabeledEpisodes([store], cameras=("side",))
    store.add(make_episode(seed=1, images={"front": np.zeros((7, 9, 9, 3), dtype=np.uint8)}))
    with pytest.raises(RewardModelError, match="images of camera 'front' are"):
        LabeledEpisodes([store], cameras=("front",))


def test_no_start_is_in_two_parts_and_every_part_has_successes_and_failures_of_every_task(tmp_path: Path) -> None:
    episodes = [
        make(seed=seed, task=task)
        for make, first in ((make_episode, 0), (failed, 100))
        for task in ("push", "pull")
        for seed in (*range(first, first + 10), first)  # one start twice
    ]
    recorded = LabeledEpisodes([store_of(tmp_path, *episodes)])
    parts = recorded.parts(0.2)
    assert sorted(np.concatenate(list(parts.values()))) == list(range(len(recorded)))
    starts, kinds = {}, {}
    for part, index in parts.items():
        chosen = [recorded.entries[e] for e in np.unique(recorded.episode[index])]
        starts[part] = {(entry.task, entry.seed) for entry in chosen}
        kinds[part] = {(entry.task, entry.success) for entry in chosen}
    assert [len(starts[part]) for part in ("fit", "threshold", "report")] == [24, 8, 8]
    assert len(starts["fit"] | starts["threshold"] | starts["report"]) == 40
    assert all(len(kind) == 4 for kind in kinds.values())
