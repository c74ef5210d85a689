"""Trimmed and split episodes: every reader of the store sees the steps that are left, the files never change."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from episodes.maintenance import info, merge, rebuild
from episodes.overlays import LABELS_NAME, outcome_unknown
from episodes.sampler import WindowSampler
from episodes.schema import EpisodeError
from episodes.store import EpisodeStore, Selection
from real_robot.corrections.browsing import EpisodeBrowser
from tests.episodes.episode_examples import assert_same, make_episode
from vla_rl.replay.demonstrations import chunk_sequences
from world_models.data.clip_sampler import ClipSampler


def steps_of(store: EpisodeStore, id: str) -> list[int]:
    """The recorded steps of what is read, from the actions' values."""
    return np.round(store.read(id).action[:, 0] * 1000).astype(int).tolist()


def test_a_trimmed_episode_reads_as_its_slice(tmp_path):
    recorded = make_episode(steps=9, shadow_action=np.zeros((9, 3), np.float32), intervention=np.full(9, -1, np.int32))
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(recorded)
        content = store.file(id).read_bytes()
        whole = store.read(id)
        store.trim(id, 2, 7, author="anna")
        part = store.read(id)
        (entry,) = store.select()
        assert (entry.id, entry.steps, entry.observations, entry.success) == (id, 5, 6, True)
        assert part.observation_steps.tolist() == [0, 1, 2, 3, 4, 5]
        assert part.state[:, 1].tolist() == [2, 3, 4, 5, 6, 7]  # the last is the observation after step 6
        for name in ("action", "reward", "terminated", "success", "actor", "shadow_action", "intervention"):
            np.testing.assert_array_equal(getattr(part, name), getattr(whole, name)[2:7])
        for camera, frames in part.images.items():
            np.testing.assert_array_equal(frames, whole.images[camera][2:8])
        store.trim(id, 1, 3, author="ben")  # counted as it is read now
        assert steps_of(store, id) == [3, 4]
        assert [change.author for change in store.history(id)] == ["anna", "ben"]
        assert store.file(id).read_bytes() == content
        store.undo(id, author="ben")
        store.undo(id, author="ben")
        assert store.undo(id, author="ben") is None
        assert_same(store.read(id), whole)


def test_a_split_gives_two_episodes_with_labels_of_their_own(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode(steps=9))
        store.label(id, "note", "good", author="anna")
        before, after = store.split(id, 4, author="anna")
        assert [entry.id for entry in store.select()] == [before, after]
        assert (steps_of(store, before), steps_of(store, after)) == ([0, 1, 2, 3], [4, 5, 6, 7, 8])
        assert store.read(before).state[-1, 1] == store.read(after).state[0, 1] == 4
        assert not store.read(before).terminated.any()
        store.label(before, "success", False, author="ben")
        assert [entry.id for entry in store.select(Selection(success=True))] == [after]
        assert store.labels(before) == {"note": "good", "success": False}
        assert store.labels(after) == {"note": "good"}
        store.delete(after, author="ben")
        assert [entry.id for entry in store.select()] == [before]
        assert [change.key for change in store.history(after)] == ["note", "split", "deleted"]
        third, fourth = store.split(before, 1, author="ben")
        assert steps_of(store, fourth) == [1, 2, 3]
        with pytest.raises(EpisodeError, match=rf"episode {id} is split; its parts are {third}, {fourth}, {after}"):
            store.read(id)
        with pytest.raises(EpisodeError, match="no episode"):
            store.read(f"{id}.0-2")
        undone = [store.undo(fourth, author="ben"), store.undo(before, author="ben"), store.undo(before, author="ben")]
        assert [(one.episode, one.key) for one in undone if one] == [
            (before, "split"),
            (before, "success"),
            (id, "split"),
        ]
        assert steps_of(store, id) == list(range(9))


def test_parts_of_a_split_that_is_made_again_have_no_labels_of_the_earlier_ones(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode(steps=9))
        before, after = store.split(id, 5, author="anna")
        inner, last = store.split(after, 2, author="anna")
        store.label(last, "note", "bad", author="anna")
        store.delete(inner, author="anna")
        assert store.split(before, 2, author="anna") == (f"{id}.0-2", f"{id}.2-5")
        undone = [store.undo(inner, author="ben"), store.undo(inner, author="ben")]
        assert [one.key for one in undone if one] == ["deleted", "split"]
        assert store.split(after, 2, author="ben") == (inner, last)
        assert store.labels(last) == {}
        assert len(store.select()) == 4  # the other part of the whole stays split
        store.delete(inner, author="ben")
        store.label(id, "split", None, author="ben")
        assert store.split(id, 5, author="ben") == (before, after)
        assert [entry.id for entry in store.select()] == [before, after]
        assert store.split(after, 2, author="ben") == (inner, last)
        assert store.labels(inner) == {}
        undone = [store.undo(last, author="ben"), store.undo(after, author="ben")]
        assert [(one.episode, one.key) for one in undone if one] == [(after, "split"), (id, "split")]
        assert steps_of(store, id) == list(range(9))
        assert [change.value for change in store.history(id)] == [5, None, 5, None]


def test_the_same_split_from_another_store_leaves_the_labels_here(tmp_path):
    with EpisodeStore(tmp_path / "here", create=True) as here, EpisodeStore(tmp_path / "there", create=True) as there:
        id = here.add(make_episode(steps=9))
        merge(there.path, here.path)
    with EpisodeStore(tmp_path / "here") as here, EpisodeStore(tmp_path / "there") as there:
        there.split(id, 5, author="ben")
        before, after = here.split(id, 5, author="anna")
        here.delete(after, author="anna")
        merge(here.path, there.path)
        assert [entry.id for entry in here.select()] == [before]


def test_cuts_survive_a_rebuild_and_are_counted(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        trimmed, divided = store.add_all([make_episode(steps=8, seed=seed) for seed in range(2)])
        size = info(tmp_path)["bytes"]
        store.trim(trimmed, 0, 3, author="anna")
        store.split(divided, 2, author="anna")
    result = rebuild(tmp_path)
    assert (result["episodes"], result["steps"], result["bytes"], result["corrupt"]) == (3, 3 + 8, size, [])
    assert result["observations"] == 4 + 3 + 7


@pytest.mark.parametrize(("first", "end"), [(0, 0), (3, 2), (1, 6), (2, 9), (-1, 4), (0, 3)])
def test_cuts_are_where_the_episode_was_observed(tmp_path, first, end):
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode(steps=8, every=2))
        with pytest.raises(EpisodeError, match=f"has 8 steps and cannot be cut at {first} and {end}"):
            store.trim(id, first, end, author="anna")
        with pytest.raises(EpisodeError, match="cannot be cut at 0 and 8"):
            store.split(id, 8, author="anna")
        assert store.history(id) == []
        store.trim(id, 2, 8, author="anna")
        assert store.read(id).observation_steps.tolist() == [0, 2, 4, 6]


def test_what_reads_the_store_reads_what_is_left(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        trimmed, divided = store.add_all([make_episode(steps=8, seed=seed) for seed in range(2)])
        sampler = WindowSampler(store, action_horizon=3, batch_size=4, seed=0)
        position = sampler.state_dict()
        store.trim(trimmed, 1, 4, author="anna")
        store.split(divided, 5, author="anna")
        cut = WindowSampler(store, action_horizon=3, batch_size=4, seed=0)
        batch = cut.windows(np.arange(len(cut)))
        at = batch.obs.state[:, 1].tolist()
        assert at == [1, 2, 3, 0, 1, 2, 3, 4, 5, 6, 7]
        assert batch.obs.images[:, 0, 0, 0, 0].tolist() == at
        # no chunk reaches past a cut
        assert batch.targets.mask.sum(1).tolist() == [3, 2, 1, 3, 3, 3, 2, 1, 3, 2, 1]
        with pytest.raises(EpisodeError, match="cannot resume exactly"):
            cut.load_state_dict(position)
        clips = ClipSampler([store], action_horizon=2)
        assert [clips.actions(i).shape[0] for i in range(3)] == [3, 5, 3]
        episodes = [store.read(entry.id) for entry in store.select()]
        replayed = [list(chunk_sequences(episode, action_horizon=3, gamma=1.0)) for episode in episodes]
        assert [sum(int(chunks.num_executed.sum()) for chunks in one) for one in replayed] == [
            3 + 2 + 1,
            3 + 2 + 3 + 1 + 3,
            6,
        ]


def test_a_cut_episode_whose_file_is_damaged_is_reported(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode(steps=8))
        store.trim(id, 1, 4, author="anna")
        store.file(id).write_bytes(b"short")
        assert info(tmp_path)["corrupt"] == [store.file(id).name]
        with pytest.raises(EpisodeError, match="corrupt episode file"):
            store.read(id)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.integers(3, 12), choices=st.lists(st.tuples(st.integers(0, 2), *[st.integers(0, 99)] * 3), max_size=8))
def test_any_cuts_partition_the_record_and_can_all_be_undone(tmp_path_factory, steps, choices):
    recorded = make_episode(steps=steps)
    with EpisodeStore(tmp_path_factory.mktemp("cuts"), create=True) as store:
        id = store.add(recorded)
        left = [list(range(steps))]  # the recorded steps of each part
        for kind, which, a, b in choices:
            entries = store.select()
            chosen = which % len(entries)
            part, length = entries[chosen].id, entries[chosen].steps
            if kind == 0:
                first = a % length
                end = first + 1 + b % (length - first)
                store.trim(part, first, end, author="anna")
                left[chosen] = left[chosen][first:end]
            elif kind == 1 and length > 1:
                at = 1 + a % (length - 1)
                store.split(part, at, author="anna")
                left[chosen : chosen + 1] = [left[chosen][:at], left[chosen][at:]]
            else:
                store.label(part, "note", a, author="anna")
            assert [steps_of(store, entry.id) for entry in store.select()] == left
        while store.undo(store.select()[0].id, author="ben") or len(store.select()) > 1:
            pass
        assert_same(store.read(id), dataclasses.replace(recorded, id=id))


def test_a_part_that_is_aborted_is_no_success_though_the_whole_was_labelled_one(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode(steps=8))
        browser = EpisodeBrowser(tmp_path, jpeg_quality=90)
        browser.label(id, "success", person="ann")
        first, second = store.split(id, 4, author="ann")
        browser.label(first, "abort", person="ann")
        assert store.labels(first) == {"outcome": "abort"}
        assert [entry.id for entry in store.select(Selection(success=True))] == [second]
        inner, _ = store.split(first, 2, author="ann")
        assert outcome_unknown(store.labels(inner))
        browser.label(inner, "success", person="ann")
        assert [entry.id for entry in store.select(Selection(success=True))] == [inner, second]


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("trim", "two to five", "trim is 'two to five', not two steps like \"2-9\""),
        ("trim", "5-2", "trim is '5-2', not two steps like \"2-9\""),
        ("trim", 3, "trim is 3, not"),
        ("split", "3", "split is '3', not a step"),
        ("split", True, "split is True, not a step"),
        ("success_from", [1], "success_from is [1], not a step"),
        ("note", {"a": 1}, "note is {'a': 1}, not a"),
    ],
)
def test_a_damaged_label_is_one_message_with_its_line(tmp_path: Path, key: str, value: object, said: str) -> None:
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode())
        store.label(id, "note", "good", author="ada")
        line = {"episode": id, "key": key, "value": value, "author": "ada", "time_s": time.time()}
        with (tmp_path / LABELS_NAME).open("a") as file:
            file.write(json.dumps(line) + "\n")
        for read in (store.select, lambda: store.undo(id, author="ada"), lambda: store.delete(id, author="ada")):
            with pytest.raises(EpisodeError) as refused:
                read()
            assert f"{tmp_path / LABELS_NAME}: line 2: {said}" in str(refused.value)
            assert "repair the line, or leave it empty" in str(refused.value)


@pytest.mark.parametrize("change", [{"time_s": "now"}, {"episode": 1}, {"undoes": "0"}])
def test_a_line_of_labels_that_lacks_its_meaning_is_named(tmp_path: Path, change: dict[str, object]) -> None:
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode())
        line = {"episode": id, "key": "note", "value": 1, "author": id, "time_s": 1.0} | change
        (tmp_path / LABELS_NAME).write_text(json.dumps(line) + "\n")
        with pytest.raises(EpisodeError, match=rf"labels\.jsonl: line 1: {next(iter(change))} is "):
            store.select()


def test_a_trim_beyond_the_end_is_one_message(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode())
        steps = store.entry(id).steps
        store.label(id, "trim", f"2-{steps + 1}", author="ada")
        for read in (store.select, lambda: store.read(id)):
            with pytest.raises(EpisodeError) as refused:
                read()
            assert str(refused.value).startswith(
                f"{tmp_path / LABELS_NAME}: episode {id} has steps 0 to {steps}, but is trimmed to 2-{steps + 1}"
            )
