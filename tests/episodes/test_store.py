"""Round trips, damage, full disks, killed and concurrent writers, with real files and processes."""

import contextlib
import json
import multiprocessing
import multiprocessing.process
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import zarr

from episodes import overlays
from episodes.archive import write_archive
from episodes.catalog import CATALOG_NAME, read_entry
from episodes.maintenance import info, rebuild, verify
from episodes.outcomes.rewards import rewarded
from episodes.overlays import LABELS_NAME, append_changes, append_labels, read_changes, read_labels
from episodes.packing import pack, unpack
from episodes.sampler import WindowSampler
from episodes.schema import CorruptEpisode, EpisodeError, InvalidEpisode, StoreFull
from episodes.store import EpisodeStore, Selection
from real_robot.corrections.browsing import EpisodeBrowser
from tests.episodes.episode_examples import assert_same, make_episode, write_episodes

# A fork server, so that the processes need not import everything again
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["episodes.store", "pytest"])


def start_writer(store: Path, *, first: int = 0, count: int = 10**6) -> multiprocessing.process.BaseProcess:
    writer = PROCESSES.Process(target=write_episodes, args=(store, store.with_suffix(".log"), first, count))
    writer.start()
    return writer


def logged(store: Path) -> list[str]:
    log = store.with_suffix(".log")
    return log.read_text().split("\n")[:-1] if log.exists() else []


def flip(path: Path, at: int, mask: int = 1) -> None:
    with path.open("rb+") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ mask]))


@pytest.mark.parametrize("every", [1, 3])
def test_round_trip(tmp_path, every):
    version = np.array([-1, 7, 7, 8, 8, -1])
    episode = make_episode(every=every, policy_version="run-3", step_policy_version=version, instruction="push " * 100)
    with EpisodeStore(tmp_path, create=True) as store:
        assert store.add(episode) == episode.id
        assert_same(store.read(episode.id), episode)
    with EpisodeStore(tmp_path) as store:
        assert_same(store.read(episode.id), episode)


def test_zarr_opens_an_episode_file(tmp_path):
    episode = make_episode()
    with EpisodeStore(tmp_path, create=True) as store:
        file = store.file(store.add(episode))
    with zarr.storage.ZipStore(file, mode="r") as zipped:
        group = zarr.open_group(zipped, mode="r", zarr_format=3)
        assert group.attrs["instruction"] == episode.instruction
        assert group.attrs["fingerprint"] == {"mujoco": "4.0.0"}
        np.testing.assert_array_equal(group["images/wrist"][:], episode.images["wrist"])
        np.testing.assert_array_equal(group["action"][2:5], episode.action[2:5])
        np.testing.assert_array_equal(group["success"][:], episode.success)
        assert sorted(group.group_keys()) == ["images"]


def test_changes_of_read_arrays_do_not_reach_the_file(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode())
        store.read(id).state[:] = 7.0
        assert store.read(id).state.max() != 7.0
    assert verify(tmp_path)["corrupt"] == []


def test_a_refused_episode_leaves_no_file_and_those_before_stay(tmp_path):
    bad = make_episode(seed=1, reward=np.full(6, np.nan, np.float32))
    with EpisodeStore(tmp_path, create=True) as store:
        with pytest.raises(InvalidEpisode, match="nan"):
            store.add_all([make_episode(seed=0), bad, make_episode(seed=2)])
        assert [entry.seed for entry in store.select()] == [0]
    assert len(list(tmp_path.glob("*ep-*"))) == 1


def test_an_episode_is_written_once(tmp_path):
    episode = make_episode()
    with EpisodeStore(tmp_path, create=True) as store:
        store.add(episode)
        with pytest.raises(EpisodeError, match="already in the store"):
            store.add(episode)


def test_a_missing_store_is_reported(tmp_path):
    with pytest.raises(EpisodeError, match=r"nowhere: no such episode store. Record one with: vla-rl collect"):
        EpisodeStore(tmp_path / "nowhere")


@pytest.mark.parametrize("schema", ["vla-rl-episode/1", "vla-rl-episode/3"])
def test_another_schema_is_reported(tmp_path, schema):
    path = write_file(tmp_path, {"schema": schema})
    with EpisodeStore(tmp_path) as store:
        assert store.select() == []
        assert f"schema is '{schema}', this version reads 'vla-rl-episode/2'" in store.corrupt[path.name]


def test_a_missing_array_is_reported(tmp_path):
    path = write_file(tmp_path, {}, without="observation_steps")
    with EpisodeStore(tmp_path) as store:
        assert "without observation_steps" in store.corrupt[path.name]


def test_an_older_file_without_an_action_delay_is_read_as_none(tmp_path):
    older, newer = make_episode(), make_episode(action_delay=2)
    arrays, attributes = pack(newer)
    assert unpack(arrays, attributes).action_delay == 2
    arrays, attributes = pack(older)
    del attributes["action_delay"]
    assert unpack(arrays, attributes).action_delay == 0


def write_file(folder: Path, attributes: dict[str, str], *, without: str = "") -> Path:
    """An episode's file with other ``attributes``, and without one array."""
    episode = make_episode()
    arrays, own = pack(episode)
    path = folder / f"ep-{episode.id}.zarr.zip"
    with path.open("wb") as file:
        kept = {name: array for name, array in arrays.items() if name != without}
        write_archive(file, arrays=kept, attributes={**own, **attributes})
    return path


def test_selection(tmp_path):
    failed = np.zeros(6, dtype=bool)
    with EpisodeStore(tmp_path, create=True) as store:
        store.add_all(
            [
                make_episode(seed=0),
                make_episode(seed=1, task="lift"),
                make_episode(seed=2, success=failed),
            ]
        )

        def seeds(**where):
            return [entry.seed for entry in store.select(Selection(**where))]

        assert seeds() == [0, 1, 2]
        assert seeds(tasks=("lift",)) == [1]
        assert seeds(tasks=("push",), success=True) == [0]
        assert seeds(success=False) == [2]


# -- labels --------------------------------------------------------------------------------------------------------


def test_labels_and_deletions_survive_a_rebuild(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        a, b, c = store.add_all([make_episode(seed=i) for i in range(3)])
        store.delete(a, author="ada")
        store.label(b, "success", False, author="ada")
        store.label(c, "quality", 0.25, author="ada")
        store.label(c, "quality", 0.75, author="bob")
    rebuild(tmp_path)
    with EpisodeStore(tmp_path) as store:
        assert [(entry.id, entry.success) for entry in store.select()] == [(b, False), (c, True)]
        assert store.labels(c) == {"quality": 0.75}
        store.label(a, "deleted", False, author="ada")
        assert len(store.select()) == 3
        with pytest.raises(EpisodeError, match="no episode nothing"):
            store.label("nothing", "quality", 1, author="ada")


def test_labels_are_read_again_only_when_they_have_changed(tmp_path, monkeypatch):
    read = []

    def counted(folder):
        read.append(folder)
        return read_labels(folder)

    monkeypatch.setattr("episodes.store.read_labels", counted)
    with EpisodeStore(tmp_path, create=True) as store, EpisodeStore(tmp_path) as other:
        ids = store.add_all([make_episode(seed=i) for i in range(3)])
        store.label(ids[0], "success", False, author="ada")
        read.clear()
        assert [rewarded(store, entry).succeeded for entry in store.select()] == [False, True, True]
        assert len(read) == 1
        other.label(ids[1], "success", False, author="bob")
        assert [rewarded(store, entry).succeeded for entry in store.select()] == [False, False, True]


def test_an_incomplete_label_is_skipped(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode())
        store.label(id, "first", 1, author="ada")
        with (tmp_path / LABELS_NAME).open("ab") as file:
            file.write(b'{"episode": "01')
        store.label(id, "second", 2, author="ada")
        assert read_labels(tmp_path) == ({id: {"first": 1, "second": 2}}, 1)


def test_a_label_and_its_file_are_on_the_disk_when_it_returns(tmp_path, monkeypatch):
    synced = []
    sync = os.fsync

    def record(descriptor):
        synced.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    source, target = tmp_path / "source", tmp_path / "target"
    for folder in (source, target):
        folder.mkdir()
    append_labels(source, episode="A", labels={"note": 1}, author="ada")
    append_labels(source, episode="A", labels={"note": 2}, author="ada")
    append_changes(target, read_changes(source))
    assert synced == ["source", LABELS_NAME, LABELS_NAME, "target", LABELS_NAME, LABELS_NAME]


# -- damage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["missing", "garbage", "truncated", "other table", "zeroed page"])
def test_a_bad_catalog_is_rebuilt(tmp_path, damage):
    with EpisodeStore(tmp_path, create=True) as store:
        ids = store.add_all([make_episode(seed=i) for i in range(40)])
    catalog = tmp_path / CATALOG_NAME
    if damage == "missing":
        catalog.unlink()
    elif damage == "garbage":
        catalog.write_bytes(b"not a database" * 200)
    elif damage == "truncated":
        os.truncate(catalog, 5000)
    elif damage == "zeroed page":
        with catalog.open("rb+") as file:
            file.seek(4096)
            file.write(bytes(8192))
    else:
        catalog.unlink()
        subprocess.run(
            [sys.executable, "-c", f"import sqlite3; c = sqlite3.connect({str(catalog)!r});"
             "c.execute('CREATE TABLE episodes (something)'); c.commit()"], check=True,
        )  # fmt: skip
    with EpisodeStore(tmp_path) as store:
        assert [entry.id for entry in store.select()] == ids


def test_the_catalog_follows_added_and_removed_files(tmp_path):
    with EpisodeStore(tmp_path / "a", create=True) as a, EpisodeStore(tmp_path / "b", create=True) as b:
        stays, leaves = a.add_all([make_episode(seed=0), make_episode(seed=1)])
        comes = b.add(make_episode(seed=2))
        os.rename(b.file(comes), a.file(comes))
        os.unlink(a.file(leaves))
    with EpisodeStore(tmp_path / "a") as a:
        assert [entry.id for entry in a.select()] == [stays, comes]


def test_truncated_files_are_reported_by_info_verify_and_read(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        complete, truncated = store.add_all([make_episode(seed=i) for i in range(2)])
        entry = store.select()[1]
        os.truncate(store.file(truncated), entry.bytes - 100)
        with pytest.raises(CorruptEpisode, match=rf"{truncated}.*Run: vla-rl data verify {tmp_path}"):
            store.read(truncated)
        assert store.read(complete).seed == 0
        name = store.file(truncated).name
    assert info(tmp_path)["corrupt"] == [name]
    assert verify(tmp_path)["corrupt"] == [name]
    after = rebuild(tmp_path)
    assert (after["episodes"], after["corrupt"]) == (1, [name])
    assert (tmp_path / name).exists()


def test_damaged_episodes_are_not_counted_before_and_after_a_rebuild(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        altered, truncated, _ = (store.file(store.add(make_episode(seed=i))) for i in range(3))
    flip(altered, altered.stat().st_size // 2)
    os.truncate(truncated, truncated.stat().st_size - 100)

    def counted():
        return [[of[key] for key in ("episodes", "steps", "successes")] for of in (info(tmp_path), verify(tmp_path))]

    assert counted() == [[2, 12, 2], [1, 6, 1]]
    rebuild(tmp_path)
    assert counted() == [[2, 12, 2], [1, 6, 1]]


def test_a_store_that_was_open_during_a_rebuild_sees_what_others_add(tmp_path):
    with EpisodeStore(tmp_path, create=True) as before:
        first = before.add(make_episode())
        rebuild(tmp_path)
        with EpisodeStore(tmp_path) as after:
            second = after.add(make_episode(seed=1))
            third = before.add(make_episode(seed=2))
            for store in (before, after):
                assert [entry.id for entry in store.select()] == [first, second, third]


def test_verify_detects_a_flipped_bit_anywhere(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        file = store.file(store.add(make_episode()))
    for at in np.linspace(0, file.stat().st_size - 1, 60).astype(int):
        flip(file, int(at), mask=4)
        assert verify(tmp_path)["corrupt"] == [file.name], f"bit flip at byte {at} was not detected"
        flip(file, int(at), mask=4)
    assert verify(tmp_path)["corrupt"] == []


def test_a_flipped_bit_of_the_directory_leaves_the_rest_of_the_store_readable(tmp_path):
    """What zipfile raises for it depends on the bit; most of what it raises is no BadZipFile."""
    with EpisodeStore(tmp_path, create=True) as store:
        intact, damaged = store.add_all([make_episode(steps=2, images={}, seed=seed) for seed in range(2)])
        file = store.file(damaged)
    directory = file.read_bytes().index(b"PK\1\2")
    for at in (10, 8, 40, 42, *range(60, file.stat().st_size - directory, 97)):  # compression, encryption, offset
        flip(file, directory + at)
        with EpisodeStore(tmp_path) as store:
            store.rebuild()
            assert store.select()[0].id == intact
            if at in (8, 10):
                assert list(store.corrupt) == [file.name]
        assert verify(tmp_path)["corrupt"] == [file.name]
        flip(file, directory + at)
    assert rebuild(tmp_path)["episodes"] == 2


def test_a_file_that_may_not_be_read_is_not_called_corrupt(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        file = store.file(store.add(make_episode()))
    file.unlink()
    file.mkdir()
    with pytest.raises(IsADirectoryError):
        read_entry(file)


def test_info_counts(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        store.add_all([make_episode(steps=6), make_episode(steps=4, every=2, task="lift")])
        size = sum(entry.bytes for entry in store.select())
    result = info(tmp_path)
    assert json.loads(json.dumps(result)) == result
    assert (result["episodes"], result["steps"], result["observations"], result["bytes"]) == (2, 10, 10, size)
    assert result["tasks"] == {"push": 1, "lift": 1}


# -- full disks ----------------------------------------------------------------------------------------------------


def check_after_full(path: Path, error: StoreFull, committed: list[str]) -> None:
    assert "no space left for episode" in str(error)
    assert "\n" not in str(error)
    assert not list(path.glob(".ep-*"))
    result = verify(path)
    assert (result["episodes"], result["corrupt"]) == (len(committed), [])


def test_a_file_size_limit_is_reported_and_damages_nothing(tmp_path):
    big = make_episode(images={"front": np.zeros((7, 256, 256, 3), np.uint8)})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with EpisodeStore(tmp_path, create=True) as store:
        committed = [store.add(make_episode(seed=1))]
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
        try:
            with pytest.raises(StoreFull) as error:
                store.add(big)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        check_after_full(tmp_path, error.value, committed)
        store.add(big)


def test_flipped_bits_are_found_by_reading_and_before_training(tmp_path):
    """In 40 places of the file: headers, attributes and every array."""
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode())
        file = store.file(id)
        for at in np.linspace(0, file.stat().st_size - 1, 40).astype(int).tolist():
            flip(file, at)
            with pytest.raises(CorruptEpisode, match="vla-rl data verify"):
                store.read(id)
            with pytest.raises(CorruptEpisode, match="vla-rl data verify"):
                WindowSampler(store, action_horizon=2, batch_size=2, seed=0)
            flip(file, at)
        assert store.read(id).id == id


def test_a_folder_that_is_no_store_is_refused_and_stays_as_it_is(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    for command in (info, verify, rebuild):
        with pytest.raises(EpisodeError, match="is not an episode store: it has no ep-"):
            command(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.fixture
def small_disk(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk takes root")
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True).returncode:
        pytest.skip("this root may not mount")
    yield disk
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def test_a_full_disk_is_reported_and_damages_nothing(small_disk):
    path = small_disk / "store"
    with EpisodeStore(path, create=True) as store:
        with pytest.raises(StoreFull) as error:
            store.add_all(make_episode(steps=40, seed=seed) for seed in range(1000))
        committed = [entry.id for entry in store.select()]
        assert len(committed) > 3
        check_after_full(path, error.value, committed)
        os.unlink(store.file(committed.pop(0)))
        committed.append(store.add(make_episode(steps=10)))
    with EpisodeStore(path) as store:
        assert [entry.id for entry in store.select()] == committed
    assert verify(path)["corrupt"] == []


def test_a_read_only_store_can_be_read(small_disk):
    path = small_disk / "store"
    with EpisodeStore(path, create=True) as store:
        ids = store.add_all([make_episode(seed=0), make_episode(seed=1)])
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with EpisodeStore(path) as store:
        assert [entry.id for entry in store.select()] == ids
        assert store.read(ids[1]).seed == 1
        with pytest.raises(OSError, match="Read-only"):
            store.add(make_episode())
    assert verify(path)["episodes"] == 2


# -- processes -----------------------------------------------------------------------------------------------------


def test_committed_episodes_survive_killed_writers(tmp_path):
    path = tmp_path / "store"
    for attempt in range(25):
        before = len(logged(path))
        writer = start_writer(path, first=1000 * attempt)
        while len(logged(path)) == before:
            time.sleep(0.001)
        time.sleep(0.0007 * attempt)
        writer.kill()
        writer.join()
        assert writer.exitcode == -signal.SIGKILL
    with EpisodeStore(path) as store:
        entries = store.select()
        assert set(logged(path)) <= {entry.id for entry in entries}
        for entry in entries:
            assert_same(store.read(entry.id), make_episode(steps=20, seed=entry.seed, id=entry.id))
    before = verify(path)
    assert before["corrupt"] == []
    (path / CATALOG_NAME).unlink()
    assert rebuild(path) == before


def test_a_store_that_another_process_makes_at_the_same_time_is_one(tmp_path, monkeypatch):
    iterdir = Path.iterdir

    def after_another(path):
        monkeypatch.undo()
        EpisodeStore(path, create=True).close()
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", after_another)
    with EpisodeStore(tmp_path, create=True) as store:
        assert store.select() == []


def test_old_temporary_files_of_killed_writers_are_deleted(tmp_path):
    with EpisodeStore(tmp_path, create=True):
        young, old = tmp_path / ".ep-A.tmp", tmp_path / ".ep-B.tmp"
        young.write_bytes(b"being written")
        old.write_bytes(b"half an episode")
        os.utime(old, (0, 0))
    with EpisodeStore(tmp_path):
        assert young.exists()
        assert not old.exists()


def test_all_episodes_of_eight_concurrent_writers_are_in_the_catalog(tmp_path):
    path = tmp_path / "store"
    writers = [start_writer(path, first=100 * i, count=25) for i in range(8)]
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    with EpisodeStore(path) as store:
        assert sorted(entry.id for entry in store.entries()) == sorted(logged(path))
        assert len(store.entries()) == 200
    assert verify(path)["corrupt"] == []


@pytest.mark.filterwarnings("ignore:.*fork")
def test_a_store_is_usable_on_both_sides_of_a_fork(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        store.add(make_episode(seed=0))
        child = multiprocessing.get_context("fork").Process(target=store.add, args=(make_episode(seed=1),))
        child.start()
        store.add(make_episode(seed=2))
        child.join()
        assert child.exitcode == 0
        assert sorted(entry.seed for entry in store.select()) == [0, 1, 2]


def test_labels_can_be_undone_one_after_the_other_and_nothing_is_erased(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode())
        other = store.add(make_episode(seed=1))
        store.label(other, "success", False, author="ben")
        assert store.undo(id, author="anna") is None
        store.label(id, "success", False, author="anna")
        store.label(id, "note", "slow", author="anna")
        store.label(id, "success", True, author="ben")
        store.delete(id, author="ben")
        assert [entry.id for entry in store.select()] == [other]
        states = []
        while (undone := store.undo(id, author="anna")) is not None:
            states.append((undone.key, store.labels(id)))
        assert states == [
            ("deleted", {"success": True, "note": "slow"}),
            ("success", {"success": False, "note": "slow"}),
            ("note", {"success": False}),
            ("success", {}),
        ]
        assert len(store.history(id)) == 8
        assert store.labels(other) == {"success": False}
        store.label(id, "success", False, author="anna")
        assert store.undo(id, author="anna").time_s > 0
        assert store.labels(id) == {}


def test_an_undo_takes_back_one_press_whoever_labels_meanwhile(tmp_path, monkeypatch):
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode())
        browser = EpisodeBrowser(tmp_path, jpeg_quality=90)
        for outcome in ("success", "abort"):  # an abort is two labels
            browser.label(id, outcome, person="ann")
        locked, waiting = overlays.labels_locked, ["cy"]

        @contextlib.contextmanager
        def then_another(folder: Path):
            with locked(folder) as file:
                yield file
            while waiting:
                store.label(id, "note", "seen", author=waiting.pop())

        monkeypatch.setattr(overlays, "labels_locked", then_another)
        browser.undo(id, person="ben")
        assert store.labels(id) == {"success": True, "note": "seen"}
