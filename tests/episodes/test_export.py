"""What is exported is read back by the import, and by LeRobot's own reader where it is installed."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import h5py
import numpy as np
import pytest
from pyarrow import parquet

from episodes.formats.export_format import ExportFormat
from episodes.formats.exporter import export_episodes
from episodes.formats.importer import import_episodes
from episodes.formats.recording import ImportMapping
from episodes.formats.to_lerobot import write_lerobot
from episodes.outcomes.rewards import rewarded
from episodes.schema import CorruptEpisode, Episode, EpisodeError
from episodes.store import EpisodeStore
from sims.errors import is_disk_full
from tests.episodes.episode_examples import make_episode
from vla_rl.cli.main import main

CAMERAS = ("front", "wrist")
LEROBOT = ImportMapping(
    cameras={camera: f"observation.images.{camera}" for camera in CAMERAS}, state=("observation.state",)
)
ROBOMIMIC = ImportMapping(cameras={camera: f"{camera}_image" for camera in CAMERAS}, state=("state",))
VIDEO_ERROR = 3.0  # mean absolute difference of a color value


def recorded(folder: Path) -> EpisodeStore:
    """Two tasks, images with some structure; the second episode fails."""
    rng, store = np.random.default_rng(0), EpisodeStore(folder, create=True)
    for seed, steps in enumerate((5, 3, 4)):
        coarse = rng.integers(0, 256, (2, steps + 1, 4, 4, 3)).astype(np.uint8)
        images = dict(zip(CAMERAS, coarse.repeat(8, axis=2).repeat(8, axis=3), strict=True))
        action = rng.uniform(-1, 1, (steps, 3)).astype(np.float32)
        episode = make_episode(steps=steps, seed=seed, images=images, action=action)
        if seed == 1:
            last = episode.terminated
            none = np.zeros_like(last)
            episode = make_episode(
                steps=steps, seed=seed, images=images, action=action, terminated=none, truncated=last, success=none,
                reward=np.zeros(steps, np.float32),
            )  # fmt: skip
        store.add(episode)
    return store


def back(source: Path, folder: Path, mapping: ImportMapping) -> list[Episode]:
    store = EpisodeStore(folder, create=True)
    import_episodes(source, store, mapping)
    return [store.read(entry.id) for entry in sorted(store.select(), key=lambda entry: entry.seed)]


@pytest.mark.parametrize(
    ("format", "mapping"), [("robomimic", ROBOMIMIC), ("lerobot-images", LEROBOT), ("lerobot", LEROBOT)]
)
def test_an_exported_store_is_imported_as_it_was(tmp_path: Path, format: ExportFormat, mapping: ImportMapping) -> None:
    store, out = recorded(tmp_path / "store"), tmp_path / ("out.hdf5" if format == "robomimic" else "out")
    assert export_episodes(store, out, format) == {"episodes": 3, "steps": 12}
    again = back(out, tmp_path / "again", mapping)
    for episode, entry in zip(again, store.select(), strict=True):
        original = store.read(entry.id)
        for name in ("state", "action", "reward", "success", "terminated", "truncated", "observation_steps"):
            np.testing.assert_array_equal(getattr(episode, name), getattr(original, name), err_msg=name)
        assert (episode.instruction, episode.control_hz) == (original.instruction, original.control_hz)
        for camera in CAMERAS:
            error = np.abs(episode.images[camera].astype(int) - original.images[camera]).mean()
            assert error <= (VIDEO_ERROR if format == "lerobot" else 0), camera


def test_one_dimension_is_a_plain_column_as_lerobot_has_it(tmp_path: Path) -> None:
    """LeRobot loads a feature of shape [1] as a number, and cannot cast a list to it."""
    store, rng = EpisodeStore(tmp_path / "store", create=True), np.random.default_rng(0)
    action, state = rng.uniform(-1, 1, (4, 1)).astype(np.float32), rng.normal(size=(5, 1)).astype(np.float32)
    store.add(make_episode(steps=4, action=action, state=state))
    export_episodes(store, tmp_path / "out", "lerobot-images")
    schema = parquet.read_schema(tmp_path / "out/data/chunk-000/file-000.parquet")
    assert [str(schema.field(name).type) for name in ("action", "observation.state")] == ["float", "float"]
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())
    assert np.shape(stats["action"]["mean"]) == (1,)
    (again,) = back(tmp_path / "out", tmp_path / "again", LEROBOT)
    np.testing.assert_array_equal(again.action, action)
    np.testing.assert_array_equal(again.state, state)


@pytest.mark.parametrize(("format", "mapping"), [("robomimic", ROBOMIMIC), ("lerobot-images", LEROBOT)])
@pytest.mark.parametrize("first", [3, 10])
def test_a_success_that_lasts_comes_back_with_one_reward_and_one_end(
    tmp_path: Path, format: ExportFormat, mapping: ImportMapping, first: int
) -> None:
    store, out = EpisodeStore(tmp_path / "store", create=True), tmp_path / "out.hdf5"
    images = {camera: np.zeros((11, 8, 8, 3), np.uint8) for camera in CAMERAS}
    id = store.add(make_episode(steps=10, images=images))
    store.label(id, "success_from", first, author="test")
    export_episodes(store, out, format)
    again = EpisodeStore(tmp_path / "again", create=True)
    import_episodes(out, again, mapping)
    original, imported = (rewarded(one, one.select()[0]) for one in (store, again))
    assert original.reward.sum() == 1
    for name in ("reward", "terminated", "success"):
        np.testing.assert_array_equal(getattr(imported, name), getattr(original, name), err_msg=name)


def test_labels_are_exported(tmp_path: Path) -> None:
    store = recorded(tmp_path / "store")
    first, second, third = (entry.id for entry in store.select())
    store.label(first, "success", False, author="test")
    store.label(second, "success", True, author="test")
    store.delete(third, author="test")
    export_episodes(store, tmp_path / "out.hdf5", "robomimic")
    with h5py.File(tmp_path / "out.hdf5") as file:
        rewards = [file[f"data/demo_{number}/rewards"][:].tolist() for number in range(len(file["data"]))]
        env_args = json.loads(file["data"].attrs["env_args"])
    assert rewards == [[0.0] * 5, [0.0, 0.0, 1.0]]
    one = make_episode()
    assert env_args == {"env_name": one.task, "type": 2, "env_kwargs": {"control_freq": one.control_hz}}


def test_success_and_rewards_of_an_export_agree_with_the_labels(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    failed, later, split = (store.add(make_episode(steps=5, seed=seed)) for seed in range(3))
    store.label(failed, "success", False, author="test")
    store.label(later, "success_from", 3, author="test")
    store.split(split, 2, author="test")  # its success is in the second part
    export_episodes(store, tmp_path / "out", "lerobot-images")
    table = parquet.read_table(tmp_path / "out/data/chunk-000/file-000.parquet").to_pydict()
    number = np.array(table["episode_index"])
    assert [np.array(table["next.success"])[number == e].astype(int).tolist() for e in range(4)] == [
        [0, 0, 0, 0, 0, 0], [0, 0, 1, 1, 1, 0], [0, 0, 0], [0, 0, 1, 0],
    ]  # fmt: skip
    assert [np.array(table["next.reward"])[number == e].tolist() for e in range(4)] == [
        [0, 0, 0, 0, 0, 0], [0, 0, 1, 0, 0, 0], [0, 0, 0], [0, 0, 1, 0],
    ]  # fmt: skip


@pytest.mark.parametrize(("format", "mapping"), [("robomimic", ROBOMIMIC), ("lerobot-images", LEROBOT)])
def test_a_demonstration_whose_step_of_success_was_cut_off_comes_back_as_a_success(
    tmp_path: Path, format: ExportFormat, mapping: ImportMapping
) -> None:
    store, out = EpisodeStore(tmp_path / "store", create=True), tmp_path / "out.hdf5"
    shown, labelled, failed, split = (store.add(make_episode(steps=5, seed=seed)) for seed in range(4))
    store.label(labelled, "success_from", 4, author="test")
    store.label(failed, "success", False, author="test")
    for id in (shown, labelled, failed):
        store.trim(id, 0, 3, author="test")
    store.trim(store.split(split, 2, author="test")[1], 0, 2, author="test")
    export_episodes(store, out, format)
    again = back(out, tmp_path / "again", mapping)
    assert [entry.success for entry in store.select()] == [True, True, False, True, True]
    # Of a split success the last part shows it, here and there.
    assert [episode.success.tolist() for episode in again] == [
        [False, False, True], [False, False, True], [False] * 3, [False] * 2, [False, True],
    ]  # fmt: skip
    assert [episode.reward.sum() for episode in again] == [1, 1, 0, 0, 1]


@pytest.mark.parametrize("format", ["robomimic", "lerobot-images"])
def test_an_episode_that_was_observed_at_its_first_step_only_is_refused(tmp_path: Path, format: ExportFormat) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    once = make_episode(steps=4, every=8)
    assert once.observation_steps.tolist() == [0]
    store.add(once)
    with pytest.raises(EpisodeError, match="not observed at every control step"):
        export_episodes(store, tmp_path / "out.hdf5", format)


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    with pytest.raises(EpisodeError, match="holds no episode"):
        export_episodes(store, tmp_path / "out", "lerobot")
    store.add(make_episode(steps=6, every=2))
    with pytest.raises(EpisodeError, match=r"record with --start\.observe_every 1"):
        export_episodes(store, tmp_path / "out", "lerobot")
    other = recorded(tmp_path / "other")
    other.add(make_episode(control_hz=10.0))
    with pytest.raises(EpisodeError, match="export stores of one robot"):
        export_episodes(other, tmp_path / "new" / "folder" / "out.hdf5", "robomimic")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "store"]  # nothing of the episodes before
    with pytest.raises(EpisodeError, match="exists; choose another --out"):
        export_episodes(other, tmp_path / "store", "lerobot")


def test_a_video_is_written_without_holding_its_frames(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    frames = np.random.default_rng(0).integers(0, 256, (21, 1, 1, 3), dtype=np.uint8).repeat(128, 1).repeat(128, 2)
    for seed in range(16):
        store.add(make_episode(steps=20, seed=seed, images={"front": frames}))
    export_episodes(store, tmp_path / "first", "lerobot")  # imports what it needs
    tracemalloc.start()
    export_episodes(store, tmp_path / "out", "lerobot")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 16 * frames.nbytes / 2


def test_a_video_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    store = recorded(tmp_path / "store")
    file = tmp_path / "out/videos/observation.images.front/chunk-000/file-000.mp4"
    file.parent.mkdir(parents=True)
    file.symlink_to(tmp_path / "missing" / "file")
    with pytest.raises(EpisodeError, match=r"file-000\.mp4: ffmpeg could not write it: .*No such file or directory"):
        write_lerobot((store.read(entry.id) for entry in store.select()), tmp_path / "out")


def test_a_full_disk_that_ffmpeg_meets_is_said_so(tmp_path: Path) -> None:
    store = recorded(tmp_path / "store")
    file = tmp_path / "out/videos/observation.images.front/chunk-000/file-000.mp4"
    file.parent.mkdir(parents=True)
    file.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_lerobot((store.read(entry.id) for entry in store.select()), tmp_path / "out")
    assert is_disk_full(caught.value)


@pytest.mark.parametrize("format", ["lerobot", "lerobot-images", "robomimic", "mcap"])
def test_an_export_that_fails_leaves_nothing_under_its_name(tmp_path: Path, format: ExportFormat) -> None:
    """The last episode cannot be read: what was written before is no complete export."""
    store = recorded(tmp_path / "store")
    with open(store.file(store.select()[-1].id), "r+b") as file:
        file.seek(-200, os.SEEK_END)
        file.write(b"damaged")
    with pytest.raises(CorruptEpisode):
        export_episodes(store, tmp_path / "out.hdf5", format)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = recorded(tmp_path / "store"), str(tmp_path / "out.hdf5")
    main(["data", "export", str(store.path), "--to", "robomimic", "--out", out, "--json"])
    assert json.loads(capsys.readouterr().out) == {"episodes": 3, "steps": 12}
    with pytest.raises(SystemExit) as stopped:
        main(["data", "export", str(store.path)])
    assert stopped.value.code == 2
    assert "needs --out" in capsys.readouterr().err


@pytest.mark.parametrize("format", ["lerobot-images", "lerobot"])
def test_lerobot_reads_it(tmp_path: Path, format: ExportFormat) -> None:
    reader = pytest.importorskip(
        "lerobot.datasets.lerobot_dataset", reason="LeRobot is not installed", exc_type=ImportError
    )
    store = recorded(tmp_path / "store")
    export_episodes(store, tmp_path / "out", format)
    data = reader.LeRobotDataset("local/out", root=tmp_path / "out", video_backend="pyav")
    originals = [store.read(entry.id) for entry in store.select()]
    assert (data.num_episodes, data.num_frames, data.fps) == (3, 15, 20)
    assert set(data.meta.stats) >= {"observation.state", "action", "observation.images.front"}
    at = 0
    for episode in originals:
        for step in range(len(episode.state)):
            item = data[at]
            assert item["task"] == episode.instruction
            np.testing.assert_array_equal(item["observation.state"].numpy(), episode.state[step])
            np.testing.assert_array_equal(item["action"].numpy(), episode.action[min(step, episode.num_steps - 1)])
            image = 255 * item["observation.images.front"].numpy().transpose(1, 2, 0)
            error = np.abs(image - episode.images["front"][step]).mean()
            assert error <= (VIDEO_ERROR if format == "lerobot" else 0.01)
            at += 1
