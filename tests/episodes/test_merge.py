"""Stores that are merged, and what is deleted for good: files, labels, damage, killed processes."""

import json
import multiprocessing
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from episodes import maintenance
from episodes.catalog import Entry
from episodes.maintenance import compact, info, merge, store_to_fill, verify
from episodes.overlays import LabelChange, append_changes
from episodes.schema import EpisodeError
from episodes.store import EpisodeStore
from tests.episodes.episode_examples import assert_same, make_episode
from vla_rl.cli.main import main

PROCESSES = multiprocessing.get_context("forkserver")


def stored(path: Path, count: int) -> list[str]:
    with EpisodeStore(path, create=True) as store:
        return store.add_all([make_episode(seed=i) for i in range(count)])


def read_ids(path: Path) -> list[str]:
    with EpisodeStore(path) as store:
        return [entry.id for entry in store.select()]


def test_episodes_and_labels_of_another_store_are_copied_once(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    own, (first, second) = stored(here, 1), stored(there, 2)
    with EpisodeStore(there) as store:
        store.label(first, "success", False, author="ada")
        expected = store.read(second)
    result = merge(here, there)
    assert (result["copied"], result["episodes"], result["corrupt"]) == (2, 3, [])
    with EpisodeStore(here) as store:
        assert_same(store.read(second), expected)
        assert {entry.id: entry.success for entry in store.select()}[first] is False
        store.delete(second, author="ada")
    assert merge(here, there)["copied"] == 0
    assert read_ids(here) == sorted([*own, first])
    assert len(read_ids(there)) == 2
    with pytest.raises(EpisodeError, match="cannot be merged into itself"):
        merge(here, here)


def label_lines(path: Path) -> list[str]:
    return (path / "labels.jsonl").read_text().splitlines()


def test_an_undo_stays_an_undo_and_is_merged_once(tmp_path: Path) -> None:
    """The line that it takes back has another number in the other store."""
    here, there = tmp_path / "here", tmp_path / "there"
    (other,), (id,) = stored(here, 1), stored(there, 1)
    with EpisodeStore(here) as copy, EpisodeStore(there) as store:
        copy.label(other, "note", "first line", author="bob")
        with (here / "labels.jsonl").open("a") as file:
            file.write('{"episode": "its writer was kil')
        store.label(id, "note", "slow", author="ann")
        store.label(id, "success", True, author="ann")
        store.undo(id, author="ann")
        merge(here, there)
        store.label(id, "success", True, author="ann")
        merge(there, here)
        assert store.labels(id) == {"note": "slow", "success": True}  # the undo came before
        undone = copy.undo(id, author="bob")
        assert undone and (undone.key, copy.labels(id)) == ("note", {})  # the last label, not the undo
        assert copy.undo(id, author="bob") is None
        merge(there, here)
        assert store.labels(id) == {"success": True}
        merge(here, there)
        assert copy.labels(id) == {"success": True}
        counts = [len(label_lines(path)) for path in (here, there)]
        merge(here, there), merge(there, here)
        assert [len(label_lines(path)) for path in (here, there)] == counts
        assert store.undo(id, author="ann") and store.labels(id) == {}
        assert store.undo(id, author="ann") is None


def test_an_undo_takes_back_what_it_undoes_and_not_what_another_labelled_meanwhile(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path / "a", create=True) as store:
        id = store.add(make_episode())
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with EpisodeStore(tmp_path / "a") as one, EpisodeStore(tmp_path / "b") as other:
        one.label(id, "success", True, author="ann")
        other.label(id, "success", False, author="bob")
        one.undo(id, author="ann")
        merge(tmp_path / "a", tmp_path / "b")
        merge(tmp_path / "b", tmp_path / "a")
        assert one.labels(id) == other.labels(id) == {"success": False}
        undone = one.undo(id, author="cy")
        assert undone and undone.author == "bob"
        assert one.labels(id) == {}


def test_a_label_that_was_overruled_is_not_revived_by_a_merge_the_other_way(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path / "a", create=True) as store:
        wrong, restored = (store.add(make_episode(seed=seed)) for seed in range(2))
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with EpisodeStore(tmp_path / "a") as store:
        store.label(wrong, "success", False, author="first look")
        store.delete(restored, author="ada")
    with EpisodeStore(tmp_path / "b") as store:
        store.label(wrong, "success", True, author="second look")
        store.delete(restored, author="bob")
        store.label(restored, "deleted", False, author="bob")
    for _ in range(2):
        merge(tmp_path / "a", tmp_path / "b")
        merge(tmp_path / "b", tmp_path / "a")
        for name in ("a", "b"):
            with EpisodeStore(tmp_path / name) as store:
                assert store.labels(wrong) == {"success": True}, name
                assert store.labels(restored) == {"deleted": False}, name


@pytest.mark.parametrize("copied", range(4))
def test_a_merge_that_is_interrupted_shows_no_episode_without_its_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: int
) -> None:
    """Nor does one that runs, to a process that reads the store meanwhile. ``copied``: how many files before."""
    here, there = tmp_path / "here", tmp_path / "there"
    stored(here, 1)
    deleted, failed, *_ = stored(there, 4)
    with EpisodeStore(there) as store:
        store.delete(deleted, author="ada")
        store.label(failed, "success", False, author="ada")
    interrupt_after(monkeypatch, copied)
    with pytest.raises(KeyboardInterrupt):
        merge(here, there)
    seen = [(1, 1), (1, 1), (2, 1), (3, 2)][copied]
    assert (info(here)["episodes"], info(here)["successes"]) == seen
    monkeypatch.undo()
    assert (merge(here, there)["episodes"], info(here)["successes"]) == (4, 3)


def test_a_new_store_whose_merge_is_interrupted_before_the_first_episode_does_not_remain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "new" / "here", tmp_path / "there"
    (id,) = stored(there, 1)
    with EpisodeStore(there) as store:
        store.label(id, "note", "slow", author="ada")
    interrupt_after(monkeypatch, 0)
    with pytest.raises(KeyboardInterrupt):
        merge(here, there)
    assert [file.name for file in tmp_path.iterdir()] == ["there"]


def interrupt_after(monkeypatch: pytest.MonkeyPatch, files: int) -> None:
    """Interrupt a merge when it has copied so many."""
    copy, left = maintenance._copy, iter(range(files))

    def interrupted(file: Path, store: EpisodeStore) -> None:
        if next(left, None) is None:
            raise KeyboardInterrupt
        copy(file, store)

    monkeypatch.setattr(maintenance, "_copy", interrupted)


def test_what_is_deleted_there_can_be_restored_here(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    deleted, kept = stored(there, 2)
    with EpisodeStore(there) as store:
        store.delete(deleted, author="ada")
    merge(here, there)
    assert read_ids(here) == [kept]
    with EpisodeStore(here) as store:
        store.undo(deleted, author="bob")
    assert read_ids(here) == [deleted, kept]


@pytest.mark.parametrize("source", ["expert", "human"])
def test_what_was_deleted_here_and_restored_there_later_comes_with_one_merge(tmp_path: Path, source: str) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    with EpisodeStore(here, create=True) as store:
        restored, kept = store.add_all([make_episode(seed=i, source=source) for i in range(2)])
        shutil.copytree(here, there)
        store.delete(restored, author="ada")
    compact(here)
    with EpisodeStore(there) as store:
        store.label(restored, "deleted", False, author="bob")
    assert merge(here, there)["copied"] == 1
    assert read_ids(here) == [restored, kept]


def test_a_part_that_was_deleted_before_its_split_was_made_again_is_not_deleted_by_a_merge(tmp_path: Path) -> None:
    with EpisodeStore(tmp_path / "a", create=True) as a:
        id = a.add(make_episode())
        part, _ = a.split(id, 2, author="ada")
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        a.delete(part, author="ada")
        with EpisodeStore(tmp_path / "b") as b:
            b.undo(id, author="bob")
            assert part in b.split(id, 2, author="bob")
            merge(a.path, b.path)
            merge(b.path, a.path)
            assert (a.labels(part), b.labels(part)) == ({}, {})


def test_a_label_that_comes_late_does_not_overrule_a_later_one(tmp_path: Path) -> None:
    (id,) = stored(tmp_path, 1)
    with EpisodeStore(tmp_path) as store:
        store.label(id, "success", False, author="ada")
        late = LabelChange(episode=id, key="success", value=True, author="a robot", time_s=time.time() - 60)
        append_changes(tmp_path, [late])
        assert store.labels(id) == {"success": False}
        assert [change.value for change in store.history(id)] == [True, False]
        assert (undone := store.undo(id, author="ada")) and undone.value is False
        assert store.labels(id) == {"success": True}


def test_what_is_labelled_here_counts_also_if_a_clock_was_ahead(tmp_path: Path) -> None:
    (id,) = stored(tmp_path, 1)
    with EpisodeStore(tmp_path) as store:
        ahead = LabelChange(episode=id, key="success", value=True, author="a robot", time_s=time.time() + 3600)
        append_changes(tmp_path, [ahead])
        store.label(id, "success", False, author="ada")
        assert store.labels(id) == {"success": False}
        store.label_together(id, {"success": None, "outcome": "abort"}, author="ada")
        assert store.labels(id) == {"outcome": "abort"}
        assert store.undo(id, author="ada") and store.labels(id) == {"success": False}


def test_undos_that_were_merged_as_labels_before_are_read_as_such(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    (id,) = stored(there, 1)
    with EpisodeStore(there) as store:
        store.label(id, "success", True, author="ann")
        store.undo(id, author="ann")
        merge(here, there)
        lines = [{**json.loads(line), "undoes": None} for line in label_lines(here)]
        (here / "labels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        store.label(id, "success", False, author="ann")
        assert merge(there, here)["copied"] == 0
        assert store.labels(id) == {"success": False}
        merge(here, there)
    with EpisodeStore(here) as store:
        assert store.labels(id) == {"success": False}
        assert store.undo(id, author="bob") and store.labels(id) == {}


def test_the_command_merges_and_names_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (id,) = stored(tmp_path / "there", 1)
    main(["data", "merge", str(tmp_path / "here"), "--source", str(tmp_path / "there"), "--json"])
    assert json.loads(capsys.readouterr().out)["copied"] == 1
    assert read_ids(tmp_path / "here") == [id]
    with pytest.raises(SystemExit, match="2"):
        main(["data", "merge", str(tmp_path / "here")])
    assert "data merge needs --source STORE the store whose episodes are copied" in capsys.readouterr().err


def test_a_store_of_another_image_size_or_robot_is_refused_before_anything_is_copied(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    own, (fits,) = stored(here, 1), stored(there, 1)
    larger = {name: np.zeros((7, 16, 16, 3), np.uint8) for name in ("front", "wrist")}
    with EpisodeStore(there) as store:
        for changes, said in (
            ({"images": larger}, "front 16x16, wrist 16x16, 4 state"),
            ({"images": {"front": make_episode().images["front"]}}, "cameras front 8x8, 4 state"),
            ({"action": np.zeros((6, 2), np.float32)}, "2 action dimensions"),
            ({"control_hz": 50.0}, "3 action dimensions, 50.0 Hz, but"),
        ):
            wrong = store.add(make_episode(**changes))
            with pytest.raises(EpisodeError, match="nothing was copied; merge it into a store of its own") as refused:
                merge(here, there)
            assert said in str(refused.value)
            assert "cameras front 8x8, wrist 8x8, 4 state and 3 action dimensions" in str(refused.value)
            assert read_ids(here) == own
            store.delete(wrong, author="ada")
    merge(here, there)
    assert read_ids(here) == sorted([*own, fits])


def test_damaged_files_are_named_and_the_others_copied(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ids = stored(there, 3)
    with EpisodeStore(there) as store:
        damaged = store.file(ids[1])
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 4
    damaged.write_bytes(content)
    result = merge(here, there)
    assert (result["copied"], result["corrupt"]) == (2, [str(damaged)])
    assert read_ids(here) == [ids[0], ids[2]]


@pytest.mark.parametrize("known", [False, True])
def test_damaged_files_here_are_replaced_by_good_ones_and_the_rest_is_copied(tmp_path: Path, known: bool) -> None:
    """``known``: damaged after the catalog was written."""
    here, there = tmp_path / "here", tmp_path / "there"
    ids = stored(there, 4)
    with EpisodeStore(there) as store:
        store.label(ids[3], "success", False, author="ada")
        expected = store.read(ids[0])
        files = [store.file(id) for id in ids]
    here.mkdir()
    damaged = [here / file.name for file in files[:2]]
    for file in damaged:
        shutil.copy(there / file.name, file)
    if known:
        info(here)
    for file in damaged:
        os.truncate(file, file.stat().st_size // 2)
    os.truncate(files[1], 100)  # damaged on both sides
    half = damaged[1].read_bytes()
    with pytest.raises(SystemExit, match="1"):
        main(["data", "merge", str(here), "--source", str(there)])
    with EpisodeStore(here) as store:
        assert_same(store.read(ids[0]), expected)
        assert [entry.success for entry in store.entries() if entry.id == ids[2]] == [True]
        assert store.labels(ids[3]) == {"success": False}
    assert damaged[1].read_bytes() == half
    assert info(here)["corrupt"] == [damaged[1].name]
    os.truncate(damaged[0], 10)
    result = merge(here, there)
    assert (result["copied"], result["replaced"]) == (1, [damaged[0].name])
    assert result["corrupt"] == sorted([damaged[1].name, str(files[1])])


@pytest.mark.parametrize("source", ["expert", "human"])
def test_what_verify_finds_is_replaced_as_well(tmp_path: Path, source: str) -> None:
    """Files with another byte, of the right size: one that is good there, one that is damaged on both sides."""
    here, there = tmp_path / "here", tmp_path / "there"
    with EpisodeStore(there, create=True) as store:
        ids = store.add_all([make_episode(seed=i, source=source) for i in range(3)])
        good, bad = (store.file(id) for id in ids[:2])
    merge(here, there)
    for file in (here / good.name, here / bad.name, bad):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    assert verify(here)["corrupt"] == sorted([good.name, bad.name])
    result = merge(here, there)
    assert (result["copied"], result["replaced"]) == (1, [good.name])
    assert result["corrupt"] == sorted([bad.name, str(bad)])
    assert verify(here)["corrupt"] == [bad.name]
    assert (here / good.name).read_bytes() == good.read_bytes()


def test_merges_of_the_same_episodes_at_the_same_time_do_not_disturb_each_other(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ids = stored(there, 60)
    EpisodeStore(here, create=True).close()
    merging = [PROCESSES.Process(target=merge, args=(here, there)) for _ in range(3)]
    for process in merging:
        process.start()
    for process in merging:
        process.join()
    assert [process.exitcode for process in merging] == [0, 0, 0]
    assert read_ids(here) == ids
    assert verify(here)["corrupt"] == []
    assert not list(here.glob(".ep-*"))


def test_a_merge_that_waits_for_one_that_fails_makes_the_store_that_it_left_nothing_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ids, end = stored(there, 2), time.monotonic() + 60
    waiting = threading.Thread(target=merge, args=(here, there))

    def fail_meanwhile() -> None:
        with store_to_fill(here):
            waiting.start()
            while f"{here}: another process adds episodes; this one waits" not in capsys.readouterr().err:
                assert time.monotonic() < end
                time.sleep(0.01)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail_meanwhile()
    waiting.join()
    assert read_ids(here) == ids


def test_a_merge_that_is_killed_continues(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    ids = stored(there, 40)
    merging = PROCESSES.Process(target=merge, args=(here, there))
    merging.start()
    while len(list(here.glob("ep-*"))) < 2:
        time.sleep(0.001)
    assert merging.pid is not None
    os.kill(merging.pid, signal.SIGKILL)
    merging.join()
    before = info(here)["episodes"]
    result = merge(here, there)
    assert result["copied"] == 40 - before
    assert read_ids(here) == ids


def test_what_is_deleted_goes_for_good_and_does_not_come_back(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    kept, split, gone = stored(there, 3)
    merge(here, there)
    with EpisodeStore(here) as store:
        before, _ = store.split(split, 2, author="ada")
        store.delete(before, author="ada")
        store.delete(gone, author="ada")
        size = store.file(gone).stat().st_size
    result = compact(here)
    assert (result["removed"], result["freed"], result["episodes"], result["corrupt"]) == (1, size, 2, [])
    assert compact(here)["removed"] == 0
    assert merge(here, there)["copied"] == 0
    with EpisodeStore(here) as store:
        assert not store.file(gone).exists()
        assert store.file(split).exists()
        assert store.select()[0].id == kept


@pytest.mark.parametrize("source", ["expert", "human"])
def test_an_episode_that_is_restored_before_its_file_goes_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    with EpisodeStore(tmp_path, create=True) as store:
        restored, gone = store.add_all([make_episode(seed=i, source=source) for i in range(2)])
        for id in (restored, gone):
            store.delete(id, author="ada")
    locked, undone = maintenance.labels_locked, list[str]()

    def after_an_undo(folder: Path) -> Any:
        with EpisodeStore(folder) as store:
            undone.extend(change.key for change in [store.undo(restored, author="ada")] if change)
        return locked(folder)

    monkeypatch.setattr(maintenance, "labels_locked", after_an_undo)
    assert compact(tmp_path)["removed"] == 1
    assert undone == ["deleted"]
    assert read_ids(tmp_path) == [restored]
    assert verify(tmp_path)["corrupt"] == []


def test_what_is_deleted_while_files_go_stays_until_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A person's recording has no label yet then, by which it would be known in another store."""
    with EpisodeStore(tmp_path, create=True) as store:
        first, second = store.add_all([make_episode(seed=i, source="human") for i in range(2)])
        store.delete(first, author="ada")
    locked = maintenance.labels_locked

    def after_a_deletion(folder: Path) -> Any:
        with EpisodeStore(folder) as store:
            store.delete(second, author="ada")
        return locked(folder)

    monkeypatch.setattr(maintenance, "labels_locked", after_a_deletion)
    assert compact(tmp_path)["removed"] == 1
    with EpisodeStore(tmp_path) as store:
        assert [entry.id for entry in store.entries()] == [second]
    monkeypatch.undo()
    assert compact(tmp_path)["removed"] == 1
    with EpisodeStore(tmp_path) as store:
        assert store.entries() == []


def test_episodes_that_go_twice_at_the_same_time_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, removed = stored(tmp_path, 3), list[int]()
    with EpisodeStore(tmp_path) as store:
        for id in ids[:2]:
            store.delete(id, author="ada")
    recordings = EpisodeStore.recordings

    def after_another(store: EpisodeStore, entries: list[Entry]) -> dict[str, bytes]:
        monkeypatch.undo()
        removed.append(compact(tmp_path)["removed"])
        return recordings(store, entries)

    monkeypatch.setattr(EpisodeStore, "recordings", after_another)
    assert compact(tmp_path)["episodes"] == 1
    assert removed == [2]
    assert read_ids(tmp_path) == ids[2:]


def test_an_episode_whose_parts_are_all_deleted_does_not_come_back(tmp_path: Path) -> None:
    """Neither does it when it is split and deleted in the other store, where it need not fit."""
    here, there = tmp_path / "here", tmp_path / "there"
    kept, split = stored(there, 2)
    merge(here, there)
    with EpisodeStore(here) as store:
        before, after = store.split(split, 2, author="ada")
        store.delete(before, author="ada")
        first, last = store.split(after, 2, author="ada")
        store.delete(first, author="ada")
        assert merge(here, there)["copied"] == 0
        store.delete(last, author="ada")
    assert compact(here)["removed"] == 1
    assert merge(here, there)["copied"] == 0
    assert read_ids(here) == [kept]
    with EpisodeStore(there) as store:
        wrong = store.add(make_episode(action=np.zeros((6, 2), np.float32)))
        for part in store.split(wrong, 2, author="ada"):
            store.delete(part, author="ada")
    merge(here, there)
    assert read_ids(here) == [kept]


def test_a_merge_of_nothing_that_fits_leaves_no_empty_store(tmp_path: Path) -> None:
    """The episodes of ``there`` have two sizes of images."""
    there = tmp_path / "there"
    stored(there, 1)
    with EpisodeStore(there) as store:
        store.add(make_episode(images={name: np.zeros((7, 16, 16, 3), np.uint8) for name in ("front", "wrist")}))
    with pytest.raises(EpisodeError):
        merge(tmp_path / "new" / "here", there)
    assert [file.name for file in tmp_path.iterdir()] == ["there"]
