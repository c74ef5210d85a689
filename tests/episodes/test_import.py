"""Import of robomimic and LeRobot files, generated here in the documented layouts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import h5py
import imageio_ffmpeg
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image
from pyarrow import parquet

from episodes.catalog import Entry
from episodes.formats.images import fit_image
from episodes.formats.importer import import_episodes, resize
from episodes.formats.recording import ImportMapping
from episodes.formats.success import parse_success
from episodes.formats.video_frames import VideoFrames
from episodes.maintenance import compact, merge, store_to_fill
from episodes.schema import Episode, EpisodeError
from episodes.store import EpisodeStore, is_store
from vla_rl.cli.main import main

STEPS = (5, 3)
SIZE = (16, 24)
RNG = np.random.default_rng(0)
ACTIONS = [RNG.uniform(-1, 1, (steps, 2)) for steps in STEPS]
STATES = [RNG.normal(size=(steps, 3)).astype(np.float32) for steps in STEPS]


def frames(episode: int) -> np.ndarray:
    """One color per step, which video compression keeps; the upper half is black."""
    out = np.zeros((STEPS[episode], *SIZE, 3), np.uint8)
    for step in range(STEPS[episode]):
        out[step, SIZE[0] // 2 :] = 60 + 40 * step + 20 * episode
    return out


def robomimic(path: Path, *, rewards: bool = True, next_obs: bool = False) -> Path:
    with h5py.File(path, "w") as file:
        data = file.create_group("data")
        data.attrs["env_args"] = json.dumps({"env_name": "Lift", "env_kwargs": {"control_freq": 20}})
        for number in (1, 0):
            demo = data.create_group(f"demo_{number}")
            demo["actions"], demo["obs/robot0_eef_pos"] = ACTIONS[number], STATES[number]
            demo["obs/agentview_image"] = frames(number)
            if next_obs:
                demo["next_obs/robot0_eef_pos"] = STATES[number] + 1
                demo["next_obs/agentview_image"] = np.roll(frames(number), -1, axis=0)
            if rewards:
                demo["rewards"] = np.eye(1, STEPS[number], STEPS[number] - 2)[0] * (1 - number)
                demo["dones"] = np.zeros(STEPS[number])
    return path


def another(path: Path, key: str, change: Callable[[np.ndarray], np.ndarray]) -> Path:
    """``robomimic(path)`` with ``change`` made to this array of every demonstration."""
    with h5py.File(robomimic(path), "a") as file:
        for demo in file["data"].values():
            demo[key][:] = change(demo[key][:])
    return path


def info(root: Path, *, version: str, paths: dict[str, str], images: str) -> None:
    image = {"dtype": images, "shape": [*SIZE, 3], "names": ["height", "width", "channels"]}
    features = {
        "observation.images.top": image,
        "observation.state": {"dtype": "float32", "shape": [3]},
        "action": {"dtype": "float32", "shape": [2]},
    }
    (root / "meta").mkdir(parents=True)
    (root / "meta" / "info.json").write_text(
        json.dumps({"codebase_version": version, "fps": 10, "chunks_size": 1000, "features": features, **paths})
    )


def columns(*episodes: int) -> dict[str, list]:
    return {
        "episode_index": [number for number in episodes for _ in range(STEPS[number])],
        "task_index": [0] * sum(STEPS[number] for number in episodes),
        "action": [256 + 256 * row for number in episodes for row in ACTIONS[number]],
        "observation.state": [row for number in episodes for row in STATES[number]],
    }


def write_parquet(path: Path, table: dict[str, list]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(table), path)


def write_mp4(path: Path, images: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{SIZE[1]}x{SIZE[0]}", "-r", "10", "-i", "-", "-g", "2", "-crf", "5", "-pix_fmt", "yuv420p"]
    subprocess.run([*command, str(path)], input=images.tobytes(), check=True)


def lerobot_3(root: Path) -> Path:
    """Both episodes in one file, images as a video."""
    place = "chunk-{chunk_index:03d}/file-{file_index:03d}"
    paths = {"data_path": f"data/{place}.parquet", "video_path": f"videos/{{video_key}}/{place}.mp4"}
    info(root, version="v3.0", paths=paths, images="video")
    write_parquet(root / "data/chunk-000/file-000.parquet", columns(0, 1))
    write_parquet(root / "meta/tasks.parquet", {"task_index": [0], "task": ["push the T"]})
    video = "videos/observation.images.top"
    episodes = {
        "episode_index": [0, 1], "tasks": [["push the T"]] * 2, "length": list(STEPS),
        "data/chunk_index": [0, 0], "data/file_index": [0, 0], f"{video}/chunk_index": [0, 0],
        f"{video}/file_index": [0, 0], f"{video}/from_timestamp": [0.0, STEPS[0] / 10],
    }  # fmt: skip
    write_parquet(root / "meta/episodes/chunk-000/file-000.parquet", episodes)
    write_mp4(root / video / "chunk-000/file-000.mp4", np.concatenate([frames(0), frames(1)]))
    return root


def lerobot_2(root: Path) -> Path:
    """One file per episode with its images in it, and success as a column."""
    paths = {"data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet", "video_path": ""}
    info(root, version="v2.1", paths=paths, images="image")
    for number in (0, 1):
        images = []
        for frame in frames(number):
            out = io.BytesIO()
            Image.fromarray(frame).save(out, "PNG")
            images.append({"bytes": out.getvalue(), "path": None})
        success = [number == 0 and step == STEPS[0] - 1 for step in range(STEPS[number])]
        table = columns(number) | {"observation.images.top": images, "next.success": success}
        write_parquet(root / f"data/chunk-000/episode_{number:06d}.parquet", table)
    (root / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "push the T"}) + "\n")
    lines = [json.dumps({"episode_index": number, "length": STEPS[number]}) + "\n" for number in (0, 1)]
    (root / "meta/episodes.jsonl").write_text("".join(lines))
    return root


PIXELS = {"action_low": (0.0,), "action_high": (512.0,), "state": ("observation.state",)}
TOP = {"top": "observation.images.top"}


def imported(source: Path, tmp_path: Path, **mapping: object) -> list[Episode]:
    store = EpisodeStore(tmp_path / "store", create=True)
    import_episodes(source, store, ImportMapping(**mapping))  # type: ignore[arg-type]
    return [store.read(entry.id) for entry in sorted(store.select(), key=lambda entry: entry.seed)]


def check(episodes: list[Episode], camera: str, *, tolerance: int) -> None:
    """The last recorded observation ends the episode, without the action that was chosen there."""
    assert len(episodes) == 2
    for number, episode in enumerate(episodes):
        np.testing.assert_allclose(episode.action, ACTIONS[number][:-1], atol=1e-5)
        np.testing.assert_array_equal(episode.state, STATES[number])
        np.testing.assert_array_equal(episode.observation_steps, np.arange(STEPS[number]))
        assert episode.observation_steps[-1] == episode.num_steps
        np.testing.assert_allclose(episode.images[camera].astype(int), frames(number), atol=tolerance)


def test_robomimic(tmp_path: Path) -> None:
    source = robomimic(tmp_path / "low_dim.hdf5")
    first, second = imported(
        source, tmp_path, cameras={"agentview": "agentview_image"}, state=("robot0_eef_pos",), instruction="lift it"
    )
    check([first, second], "agentview", tolerance=0)
    assert first.success.tolist() == [False, False, False, True]
    assert (first.terminated[-1], first.truncated[-1]) == (True, False)
    assert (second.succeeded, second.truncated[-1]) == (False, True)
    assert (first.control_hz, first.instruction, first.source) == (20.0, "lift it", "human")


def test_the_observation_after_the_last_action_is_read_where_the_file_has_it(tmp_path: Path) -> None:
    first, _ = imported(
        robomimic(tmp_path / "low_dim.hdf5", next_obs=True),
        tmp_path,
        cameras={"agentview": "agentview_image"},
        state=("robot0_eef_pos",),
        instruction="lift it",
    )
    assert (len(first.action), first.observation_steps.tolist()) == (5, [0, 1, 2, 3, 4, 5])
    np.testing.assert_array_equal(first.state[-1], STATES[0][-1] + 1)
    np.testing.assert_array_equal(first.images["agentview"][-1], frames(0)[0])
    assert first.success.tolist() == [False, False, False, True, True]


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("recorded", [False, False, False, True]),
        ("end", [False, False, False, True]),
        ("none", [False] * 4),
        ("next.reward>=0.3", [False, False, True, True]),  # reward t is given after action t
        ("next.reward > .5", [False, False, False, False]),
        ("progress[1]>=30", [False, False, True, True]),  # observation t + 1 is seen after action t
        ("progress[0]<-35", [False, False, False, True]),
    ],
)
def test_success_by_a_rule(tmp_path: Path, rule: str, expected: list[bool]) -> None:
    rows, sent = (
        5,
        {"progress": [[-10.0 * t, 10.0 * t] for t in range(5)], "next.reward": [[0.1], [0.2], [0.4], [0.1], [0.5]]},
    )
    root = lerobot_2(tmp_path / "pusht")
    path = root / "data/chunk-000/episode_000000.parquet"
    parquet.write_table(pa.table(parquet.read_table(path).to_pydict() | sent), path)
    described = json.loads((root / "meta/info.json").read_text())
    described["features"] |= {key: {"dtype": "float32", "shape": [2]} for key in sent}
    described["features"] |= {"next.success": {"dtype": "bool", "shape": [1]}}
    (root / "meta/info.json").write_text(json.dumps(described))
    (root / "meta/episodes.jsonl").write_text(json.dumps({"episode_index": 0, "length": rows}) + "\n")
    (episode,) = imported(root, tmp_path, **PIXELS, success=parse_success(rule))
    assert episode.success.tolist() == expected
    assert (bool(episode.terminated[-1]), bool(episode.truncated[-1])) == (expected[-1], not expected[-1])


@pytest.mark.parametrize("text", ["sometimes", "next.reward", "next.reward>=", "next.reward>=-", "a b>=1"])
def test_a_rule_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(EpisodeError, match=r"--success must be recorded, end, none or a rule such as"):
        parse_success(text)


def test_a_rule_names_a_key_of_the_recording(tmp_path: Path) -> None:
    fits = {"state": ("robot0_eef_pos",), "instruction": "lift"}
    source = robomimic(tmp_path / "demo.hdf5")
    with pytest.raises(EpisodeError, match=r"demo_0 has no 'next.reward'; it has .*rewards"):
        imported(source, tmp_path, **fits, success=parse_success("next.reward>=1"))
    with pytest.raises(EpisodeError, match=r"'robot0_eef_pos' has 3 entries, --success names 3"):
        imported(source, tmp_path, **fits, success=parse_success("robot0_eef_pos[3]>=1"))


def test_images_are_resized_as_an_arm_s_are(tmp_path: Path) -> None:
    """16 x 24, the upper half black, to 32 x 32: the middle 16 columns, without borders; a policy acts on the same."""
    (first, _) = imported(lerobot_2(tmp_path / "pusht"), tmp_path, cameras=TOP, **PIXELS, image_size=(32, 32))
    assert first.images["top"].shape == (5, 32, 32, 3)
    rows = first.images["top"][1].mean((1, 2))
    assert (rows[:14] == 0).all()
    np.testing.assert_allclose(rows[18:], 100, atol=1)
    source = np.random.default_rng(0).integers(0, 256, (2, 30, 40, 3), dtype=np.uint8)
    for size in ((16, 16), (30, 40), (12, 32)):
        expected = [fit_image(image, size).numpy() for image in source]
        np.testing.assert_array_equal(resize(source, size), expected)


def test_seeds_of_several_imports_into_one_store_differ(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    mapping = ImportMapping(state=("robot0_eef_pos",), instruction="lift")
    import_episodes(robomimic(tmp_path / "a.hdf5"), store, mapping)
    import_episodes(another(tmp_path / "b.hdf5", "actions", lambda value: 0.5 * value), store, mapping)
    assert sorted(entry.seed for entry in store.select()) == [0, 1, 2, 3]


def test_seeds_differ_where_an_episode_was_left_out(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    mapping = ImportMapping(state=("robot0_eef_pos",), instruction="lift")
    for name, factor in (("a.hdf5", 5.0), ("b.hdf5", 0.5)):
        with h5py.File(robomimic(tmp_path / name), "a") as file:
            for demo in list(file["data"].values())[: 1 if factor > 1 else 2]:  # 5: not within the limits
                demo["actions"][:] = factor * demo["actions"][:]
        import_episodes(tmp_path / name, store, mapping, skip_bad=True)
    assert len({entry.seed for entry in store.select()}) == len(store.select()) == 3


def test_importing_again_adds_only_what_is_new(tmp_path: Path) -> None:
    source, store = robomimic(tmp_path / "low_dim.hdf5"), EpisodeStore(tmp_path / "store", create=True)
    mapping = ImportMapping(state=("robot0_eef_pos",), instruction="lift it")
    assert import_episodes(source, store, mapping) == {"episodes": 2, "successes": 1, "present": 0, "skipped": []}
    with h5py.File(moved := source.rename(tmp_path / "moved.hdf5"), "a") as file:
        for name, array in file["data/demo_0/obs"].items():
            file[f"data/demo_2/obs/{name}"] = array[:]
        file["data/demo_2/actions"] = 0.5 * file["data/demo_0/actions"][:]
    assert import_episodes(moved, store, mapping) == {"episodes": 1, "successes": 1, "present": 2, "skipped": []}
    assert len(store.select()) == 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"image_size": (6, 8)}, "cameras a 6x8, 3 state"),
        ({"control_hz": 5.0}, "5.0 Hz, but"),
        ({"state": ("robot0_eef_pos", "robot0_eef_pos")}, "6 state"),
        ({"cameras": {}}, "cameras none"),
    ],
)
def test_episodes_that_differ_from_those_in_the_store_are_refused(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    mapping = ImportMapping(cameras={"a": "agentview_image"}, state=("robot0_eef_pos",), instruction="lift")
    import_episodes(robomimic(tmp_path / "a.hdf5"), store, mapping)
    before = store.select()
    other = another(tmp_path / "b.hdf5", "actions", lambda value: 0.5 * value)
    with pytest.raises(EpisodeError, match=rf"b.hdf5: demo_0 has .*{said}.*import it into a store of its own"):
        import_episodes(other, store, replace(mapping, **change))
    assert store.select() == before


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"cameras": {}}, "cameras a 16x24, .* now cameras none"),
        ({"control_hz": 5.0}, "20.0 Hz, now .* 5.0 Hz"),
        ({"instruction": "push"}, "instruction 'lift', now 'push'"),
        ({"task": "push"}, "task 'lift', now 'push'"),
        ({"success": "none"}, "another success"),
        ({"orientation": "half_turn"}, "a=agentview_image as_recorded', now 'a=agentview_image half_turn'"),
        ({"action_high": (1.0, 2.0)}, r"action limits -1.0 to 1.0, -1.0 to 1.0, now -1.0 to 1.0, -1.0 to 2.0"),
        ({"action_low": (-2.0,), "action_high": (2.0,)}, r"action limits -1.0 to 1.0, -1.0 to 1.0, now -2.0 to 2.0"),
        ({"state": ("turned",)}, "state robot0_eef_pos, now turned"),
    ],
)
def test_importing_again_with_other_options_is_refused(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    source, store = robomimic(tmp_path / "demo.hdf5"), EpisodeStore(tmp_path / "store", create=True)
    with h5py.File(source, "a") as file:
        for demo in file["data"].values():
            demo["obs/turned"] = demo["obs/robot0_eef_pos"][:][:, ::-1]
    mapping = ImportMapping(cameras={"a": "agentview_image"}, state=("robot0_eef_pos",), instruction="lift")
    import_episodes(source, store, mapping)
    before = store.select()
    with pytest.raises(EpisodeError, match=rf"demo_0 is in .*store already, with .*{said}.*a store of its own"):
        import_episodes(source, store, replace(mapping, **change))
    assert store.select() == before


def test_another_recording_of_the_same_actions_is_imported_with_other_limits(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    mapping = ImportMapping(state=("robot0_eef_pos",), instruction="lift")
    import_episodes(robomimic(tmp_path / "a.hdf5"), store, mapping)
    other = another(tmp_path / "b.hdf5", "obs/robot0_eef_pos", lambda value: value + 1)
    wider = replace(mapping, action_high=(2.0,))
    for new, present in ((2, 0), (0, 2)):
        counts = import_episodes(other, store, wider)
        assert (counts["episodes"], counts["present"]) == (new, present)


def damaged_robomimic(folder: Path) -> tuple[Path, dict[str, str]]:
    """One without actions, one with too few images, one with NaN; and why they cannot be imported."""
    with h5py.File(robomimic(folder / "demo.hdf5"), "a") as file:
        for number in (2, 3, 4):
            file.copy("data/demo_0", f"data/demo_{number}")
        del file["data/demo_2/actions"], file["data/demo_3/obs/agentview_image"]
        file["data/demo_3/obs/agentview_image"] = frames(0)[:-1]
        file["data/demo_4/obs/robot0_eef_pos"][1] = np.nan
    why = {"demo_2": "no actions", "demo_3": "has 4 steps for 5 actions", "demo_4": "is nan"}
    return folder / "demo.hdf5", why


def damaged_lerobot(folder: Path) -> tuple[Path, dict[str, str]]:
    """One whose file is missing, one with an image that is none."""
    root = lerobot_2(folder / "pusht")
    table = parquet.read_table(root / "data/chunk-000/episode_000000.parquet").to_pydict()
    table["episode_index"] = [3] * STEPS[0]
    table["observation.images.top"][2]["bytes"] = b"no image"
    write_parquet(root / "data/chunk-000/episode_000003.parquet", table)
    with open(root / "meta/episodes.jsonl", "a") as file:
        file.writelines(json.dumps({"episode_index": number}) + "\n" for number in (2, 3))
    return root, {"episode 2": "is missing", "episode 3": "cannot be read"}


@pytest.mark.parametrize("damaged", [damaged_robomimic, damaged_lerobot])
def test_bad_episodes_are_left_out_where_asked_for_and_named(
    tmp_path: Path, damaged: Callable[[Path], tuple[Path, dict[str, str]]]
) -> None:
    source, why = damaged(tmp_path)
    command = [
        sys.executable,
        "-m",
        "vla_rl.cli",
        "data",
        "import",
        str(tmp_path / "store"),
        "--source",
        str(source),
        "--success",
        "none",
    ]
    command += ["--instruction", "lift"]
    if damaged is damaged_robomimic:
        command += ["--state", "robot0_eef_pos", "--camera", "a=agentview_image"]
    else:
        command += ["--state", "observation.state", "--camera", "a=observation.images.top"]
        command += ["--action-low", "0", "--action-high", "512"]
    refused = subprocess.run(command, capture_output=True, text=True, check=False)
    assert refused.returncode == 2 and "give --skip-bad" in refused.stderr
    done = subprocess.run([*command, "--skip-bad", "--json"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["episodes"], result["present"]) == (0, 2)  # those before the bad one were imported already
    assert [one["episode"].rpartition(": ")[2] for one in result["skipped"]] == list(why)
    assert all(text in one["reason"] for one, text in zip(result["skipped"], why.values(), strict=True))
    told = subprocess.run([*command, "--skip-bad"], capture_output=True, text=True, check=False).stdout
    assert all(name in told and text in told for name, text in why.items())


def test_a_source_of_bad_episodes_alone_is_refused(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    with pytest.raises(EpisodeError, match=r"none of 2 episodes can be imported: demo.hdf5: demo_0 has no 'x'"):
        import_episodes(
            robomimic(tmp_path / "demo.hdf5"), store, ImportMapping(state=("x",), instruction="lift"), skip_bad=True
        )


def test_cut_and_deleted_episodes_are_not_imported_again(tmp_path: Path) -> None:
    source, store = robomimic(tmp_path / "low_dim.hdf5"), EpisodeStore(tmp_path / "store", create=True)
    mapping = ImportMapping(state=("robot0_eef_pos",), instruction="lift it")
    import_episodes(source, store, mapping)
    trimmed, deleted = (entry.id for entry in store.select())
    store.trim(trimmed, 1, 3, author="test")
    store.delete(deleted, author="test")
    assert import_episodes(source, store, mapping) == {"episodes": 0, "successes": 0, "present": 2, "skipped": []}
    assert [(entry.id, entry.steps) for entry in store.select()] == [(trimmed, 2)]
    store.undo(trimmed, author="test")
    store.split(trimmed, 2, author="test")
    assert import_episodes(source, store, mapping) == {"episodes": 0, "successes": 0, "present": 2, "skipped": []}


@pytest.mark.parametrize("command", ["import", "merge"])
def test_a_recording_that_two_commands_bring_at_the_same_time_is_there_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """The second begins when the first has seen what is there."""
    source, mapping = robomimic(tmp_path / "demo.hdf5"), ImportMapping(state=("robot0_eef_pos",), instruction="lift")
    for name in ("a", "b"):
        import_episodes(source, EpisodeStore(tmp_path / name, create=True), mapping)
    here, recordings = tmp_path / "here", EpisodeStore.recordings

    def bring(other: str) -> None:
        if command == "merge":
            merge(here, tmp_path / other)
        else:
            with store_to_fill(here) as store:
                import_episodes(source, store, mapping)

    def before_another(store: EpisodeStore, entries: Iterable[Entry]) -> dict[str, bytes]:
        found = recordings(store, entries)
        monkeypatch.undo()
        second.start()
        second.join(timeout=1)
        return found

    second = threading.Thread(target=bring, args=("b",))
    monkeypatch.setattr(EpisodeStore, "recordings", before_another)
    bring("a")
    second.join()
    with EpisodeStore(here) as store:
        assert len(store.entries()) == 2


def test_a_recording_that_two_stores_imported_is_merged_once(tmp_path: Path) -> None:
    """Its ids and seeds differ: the copy could be on the other side of a division by starts."""
    mapping = ImportMapping(state=("robot0_eef_pos",), instruction="lift it")
    source = robomimic(tmp_path / "low_dim.hdf5")
    with h5py.File(robomimic(tmp_path / "other.hdf5"), "a") as file:
        for demo in file["data"].values():
            demo["actions"][:] = 0.5 * demo["actions"][:]
    here, there = (EpisodeStore(tmp_path / name, create=True) for name in ("here", "there"))
    import_episodes(source, here, mapping)
    import_episodes(tmp_path / "other.hdf5", there, mapping)
    import_episodes(source, there, mapping)
    cut, kept = (entry.id for entry in here.select())
    here.trim(cut, 1, 3, author="test")
    there.delete(there.select()[-1].id, author="test")
    for copied, present in ((2, 2), (0, 1)):  # the label of the deleted one is here by then
        merged = merge(here.path, there.path)
        assert (merged["copied"], merged["present"], merged["episodes"]) == (copied, present, 4)
    assert {cut, kept} < {entry.id for entry in here.select()}
    assert sorted(entry.seed for entry in here.select()) == [0, 0, 1, 1]  # of other recordings


def test_a_deleted_recording_does_not_come_back_from_a_store_that_imported_it_too(tmp_path: Path) -> None:
    """Its id is another one there; compacted, only its digest tells that it was here."""
    source = robomimic(tmp_path / "low_dim.hdf5")
    mapping = ImportMapping(state=("robot0_eef_pos",), instruction="lift it")
    here, there = (EpisodeStore(tmp_path / name, create=True) for name in ("here", "there"))
    import_episodes(source, here, mapping)
    import_episodes(source, there, mapping)
    here.delete(here.select()[0].id, author="test")
    assert compact(here.path)["removed"] == 1
    merged = merge(here.path, there.path)
    assert (merged["copied"], merged["present"], merged["episodes"]) == (0, 2, 1)
    assert import_episodes(source, here, mapping)["episodes"] == 1  # which asks for it


def test_without_rewards_a_demonstration_is_a_success_and_images_can_be_flipped(tmp_path: Path) -> None:
    source = robomimic(tmp_path / "demo.hdf5", rewards=False)
    first, _ = imported(
        source,
        tmp_path,
        cameras={"a": "agentview_image"},
        state=("robot0_eef_pos",),
        instruction="lift",
        orientation="upside_down",
    )
    assert first.success.tolist() == [False] * 3 + [True]
    np.testing.assert_array_equal(first.images["a"], frames(0)[:, ::-1])


def test_lerobot_3(tmp_path: Path) -> None:
    episodes = imported(lerobot_3(tmp_path / "pusht"), tmp_path, cameras=TOP, **PIXELS)
    check(episodes, "top", tolerance=14)
    assert [episode.succeeded for episode in episodes] == [True, True]
    assert (episodes[1].instruction, episodes[1].control_hz) == ("push the T", 10.0)


def test_lerobot_2(tmp_path: Path) -> None:
    episodes = imported(lerobot_2(tmp_path / "pusht"), tmp_path, cameras=TOP, **PIXELS)
    check(episodes, "top", tolerance=0)
    assert [episode.succeeded for episode in episodes] == [True, False]


@pytest.mark.parametrize(("rule", "success"), [("none", False), ("observation.state[0]>99", False), ("end", True)])
def test_a_named_rule_takes_the_place_of_a_reward_for_success(tmp_path: Path, rule: str, success: bool) -> None:
    first, _ = imported(lerobot_2(tmp_path / "pusht"), tmp_path, success=parse_success(rule), **PIXELS)
    assert (first.succeeded, bool(first.terminated[-1])) == (success, success)
    assert not first.reward.any()  # as of a recording without rewards; its success is paid when it is replayed


def test_a_dense_reward_is_kept_whatever_the_rule(tmp_path: Path) -> None:
    source = robomimic(tmp_path / "demo.hdf5")
    with h5py.File(source, "a") as file:
        file["data/demo_0/rewards"][:] = 0.5
    mapping = {"state": ("robot0_eef_pos",), "instruction": "lift", "success": "none"}
    assert imported(source, tmp_path, **mapping)[0].reward.tolist() == [0.5, 0.5, 0.5, 1.0]


@pytest.mark.parametrize("listed", [True, False])
def test_an_episode_of_several_instructions_needs_one(tmp_path: Path, *, listed: bool) -> None:
    """LeRobot lists them for the episode, and has the index of one for each step."""
    root = lerobot_2(tmp_path / "pusht")
    second = json.dumps({"task_index": 1, "task": "then leave it"}) + "\n"
    with (root / "meta/tasks.jsonl").open("a") as file:
        file.write(second)
    lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    lines[0] |= {"tasks": ["push the T", "then leave it"]} if listed else {"tasks": []}
    (root / "meta/episodes.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = root / "data/chunk-000/episode_000000.parquet"
    table = parquet.read_table(path).to_pydict()
    table["task_index"][-1] = 1
    write_parquet(path, table)
    message = r"episode 0 has 2 instructions \('push the T', 'then leave it'\).*give --instruction"
    with pytest.raises(EpisodeError, match=message):
        imported(root, tmp_path, **PIXELS)
    assert imported(root, tmp_path, instruction="push", **PIXELS)[0].instruction == "push"


def test_lerobot_s_column_of_actions_may_be_called_so(tmp_path: Path) -> None:
    root = lerobot_2(tmp_path / "pusht")
    path = root / "data/chunk-000/episode_000000.parquet"
    table = parquet.read_table(path)
    parquet.write_table(table.rename_columns(["actions" if n == "action" else n for n in table.column_names]), path)
    first, _ = imported(root, tmp_path, **PIXELS)
    np.testing.assert_allclose(first.action, ACTIONS[0][:4], atol=1e-6)
    parquet.write_table(table.drop_columns(["action"]), path)
    with pytest.raises(EpisodeError, match=r"columns action or actions .*; there are episode_index, task_index, obs"):
        imported(root, tmp_path / "other", **PIXELS)


@pytest.mark.parametrize(
    ("name", "old", "new", "missing"),
    [
        ("meta/tasks.jsonl", "task_index", "index", "task_index"),
        ("meta/episodes.jsonl", "episode_index", "index", "episode_index"),
        ("meta/info.json", "episode_chunk", "part", "part"),
        ("meta/info.json", '"dtype": "image"', '"kind": "image"', "dtype"),
    ],
)
def test_what_the_meta_of_a_lerobot_data_set_lacks_is_named(
    tmp_path: Path, name: str, old: str, new: str, missing: str
) -> None:
    root = lerobot_2(tmp_path / "pusht")
    text = (root / name).read_text()
    assert old in text
    (root / name).write_text(text.replace(old, new))
    with pytest.raises(EpisodeError, match=f"pusht: its meta has no '{missing}', which is needed"):
        imported(root, tmp_path, cameras=TOP, **PIXELS)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("meta/info.json", r"meta/info.json is not a JSON object"),
        ("data/chunk-000/episode_000000.parquet", r"episode_000000.parquet cannot be read as parquet"),
    ],
)
def test_a_file_of_an_interrupted_download_is_named(tmp_path: Path, name: str, message: str) -> None:
    root = lerobot_2(tmp_path / "pusht")
    content = (root / name).read_bytes()
    (root / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(EpisodeError, match=message):
        imported(root, tmp_path, **PIXELS)


@pytest.mark.parametrize("character", ["\u2028", "\u2029", "\x85", "\xe9"])
def test_a_line_of_a_jsonl_file_ends_at_a_newline_only_and_is_utf_8(tmp_path: Path, character: str) -> None:
    root, task = lerobot_2(tmp_path / "pusht"), f"push{character}the T"
    lines = json.dumps({"task_index": 0, "task": task}, ensure_ascii=False) + "\r\n\n"
    (root / "meta/tasks.jsonl").write_bytes(lines.encode())
    first, _ = imported(root, tmp_path, **PIXELS)
    assert first.instruction == task


@pytest.mark.parametrize("text", [b'{"task_index": 0, "ta', b"7", b'{"task": "\xff"}'])
def test_a_damaged_line_of_a_jsonl_file_is_named(tmp_path: Path, text: bytes) -> None:
    root = lerobot_2(tmp_path / "pusht")
    with (root / "meta/tasks.jsonl").open("ab") as file:
        file.write(text)
    with pytest.raises(EpisodeError, match=r"meta/tasks.jsonl, line 2 is not a JSON object"):
        imported(root, tmp_path, **PIXELS)


@pytest.mark.parametrize(
    ("images", "said"),
    [
        (frames(0) / np.float32(255), r"'wrist' is float32 \[5, 16, 24, 3\]"),
        (np.moveaxis(frames(0), -1, 1), r"'wrist' is uint8 \[5, 3, 16, 24\]"),
        (frames(0)[..., 0], r"'wrist' is uint8 \[5, 16, 24\]"),
    ],
)
@pytest.mark.parametrize("size", [None, (8, 8)])
def test_images_of_another_kind_are_refused(
    tmp_path: Path, images: np.ndarray, said: str, size: tuple[int, int] | None
) -> None:
    source = robomimic(tmp_path / "demo.hdf5")
    with h5py.File(source, "a") as file:
        file["data/demo_0/obs/wrist"] = images
    mapping = {"cameras": {"wrist": "wrist"}, "state": ("robot0_eef_pos",), "instruction": "lift", "image_size": size}
    with pytest.raises(EpisodeError, match=rf"demo_0: {said}; --camera needs images of uint8 \[T, height, width, 3\]"):
        imported(source, tmp_path, **mapping, orientation="half_turn")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"state": ("joints",)}, r"demo_0 has no 'joints'; it has agentview_image, robot0_eef_pos"),
        ({"state": ()}, r"name the keys of the state: --state, of agentview_image, robot0_eef_pos"),
        ({"instruction": None}, "give --instruction"),
        ({"action_low": (-0.1,), "action_high": (0.1,)}, "--action-low and --action-high"),
        ({"action_low": (-1.0,) * 3}, "--action-low has 3 numbers for 2 action dimensions: give one, or 2"),
        ({"action_high": ()}, "--action-high has 0 numbers for 2 action dimensions: give one, or 2"),
        ({"action_low": (1.0,)}, r"--action-high \[1, 1\] must be above --action-low \[1, 1\] in every dimension"),
        ({"action_high": (1.0, -2.0)}, r"--action-high \[1, -2\] must be above --action-low \[-1, -1\]"),
        ({"action_high": (float("inf"),)}, r"--action-high \[inf, inf\] must be above"),
    ],
)
def test_missing_or_wrong_mappings_are_reported(tmp_path: Path, change: dict, message: str) -> None:
    fits = {"state": ("robot0_eef_pos",), "instruction": "lift"}
    with pytest.raises(EpisodeError, match=message):
        imported(robomimic(tmp_path / "demo.hdf5"), tmp_path, **(fits | change))


def test_files_of_other_formats_and_incomplete_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "damaged.hdf5").write_bytes(b"no HDF5")
    for name, message in (
        ("notes.txt", "nor a robomimic file"),
        ("damaged.hdf5", "cannot be read as HDF5"),
        ("missing.hdf5", "missing.hdf5: no such file$"),
        ("missing", "missing: no such file$"),
    ):
        with pytest.raises(EpisodeError, match=message):
            imported(tmp_path / name, tmp_path)
    root = lerobot_3(tmp_path / "gone")
    (root / "videos/observation.images.top/chunk-000/file-000.mp4").unlink()
    with pytest.raises(EpisodeError, match=r"file-000.mp4 is missing"):
        imported(root, tmp_path, cameras=TOP, **PIXELS)


def test_a_video_is_decoded_once_for_all_its_episodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root, started, popen = lerobot_3(tmp_path / "pusht"), list[str](), subprocess.Popen

    def counted(command: list[str], **options: Any) -> Any:
        started.append(command[0])
        return popen(command, **options)

    monkeypatch.setattr(subprocess, "Popen", counted)
    check(imported(root, tmp_path, cameras=TOP, **PIXELS), "top", tolerance=6)
    assert started == [imageio_ffmpeg.get_ffmpeg_exe()]


def test_frames_of_videos_are_read_in_any_order(tmp_path: Path) -> None:
    both = np.concatenate([frames(0), frames(1)])
    paths = [tmp_path / "forwards.mp4", tmp_path / "backwards.mp4"]
    write_mp4(paths[0], both)
    write_mp4(paths[1], both[::-1])
    size = {"height": SIZE[0], "width": SIZE[1]}
    with contextlib.closing(VideoFrames()) as videos:
        for camera, file, first, count in (
            ("top", 0, 0, 2), ("top", 0, 2, 1), ("side", 1, 3, 2), ("top", 0, 5, 3), ("side", 1, 6, 1),
            ("top", 0, 1, 4), ("top", 1, 0, 8), ("side", 1, 6, 2),
        ):  # fmt: skip
            found = videos.read(camera, paths[file], first=first, count=count, **size)
            expected = (both, both[::-1])[file][first : first + count]
            np.testing.assert_allclose(found.astype(int), expected, atol=6)
        with pytest.raises(EpisodeError, match=r"frames 6 to 8 cannot be read: the file ends before frame 8"):
            videos.read("top", paths[0], first=6, count=3, **size)
        with pytest.raises(EpisodeError, match=r"frames 0 to 0 cannot be read: frame 0 is 16 x 24, not 24 x 16"):
            videos.read("top", paths[0], first=0, count=1, height=24, width=16)
        paths[0].write_bytes(paths[0].read_bytes()[:200])
        with pytest.raises(EpisodeError, match=r"forwards.mp4: frames 0 to 0 cannot be read: .*moov atom not found"):
            videos.read("top", paths[0], first=0, count=1, **size)


def with_times(root: Path, dropped: set[int]) -> Path:
    """Rows have their times; ``dropped``: rows of episode 0 that are missing, though the video has their frames."""
    path = root / "data/chunk-000/file-000.parquet"
    table = columns(0, 1)
    table["timestamp"] = [step / 10 for count in STEPS for step in range(count)]
    kept = [row for row in range(sum(STEPS)) if row not in dropped]
    write_parquet(path, {key: [values[row] for row in kept] for key, values in table.items()})
    return root


def test_rows_that_are_not_a_control_step_apart_are_refused(tmp_path: Path) -> None:
    check(
        imported(with_times(lerobot_3(tmp_path / "whole"), set()), tmp_path, cameras=TOP, **PIXELS), "top", tolerance=6
    )
    root = with_times(lerobot_3(tmp_path / "thinned"), {1, 2})
    with pytest.raises(EpisodeError, match=r"episode 0: row 1 is of 0.3 s, expected is 0.1 s at 10 steps per second"):
        imported(root, tmp_path / "other", cameras=TOP, **PIXELS)
    root = with_times(lerobot_3(tmp_path / "half"), set(range(STEPS[0])))
    with pytest.raises(EpisodeError, match=r"episode 0 has no rows; download"):
        imported(root, tmp_path / "other", cameras=TOP, **PIXELS)


@pytest.mark.parametrize("key", ["fps", "features", "data_path"])
def test_what_info_json_lacks_is_named(tmp_path: Path, key: str) -> None:
    root = lerobot_3(tmp_path / "pusht")
    found = json.loads((root / "meta/info.json").read_text())
    del found[key]
    (root / "meta/info.json").write_text(json.dumps(found))
    with pytest.raises(EpisodeError, match=rf"info.json has no {key}; download"):
        imported(root, tmp_path, cameras=TOP, **PIXELS)


def test_a_final_observation_without_its_images_is_none(tmp_path: Path) -> None:
    whole, damaged = (robomimic(tmp_path / f"{name}.hdf5", next_obs=True) for name in ("whole", "damaged"))
    with h5py.File(damaged, "a") as file:
        for demo in file["data"].values():
            del demo["next_obs/agentview_image"]
    mapping = {"cameras": {"a": "agentview_image"}, "state": ("robot0_eef_pos",), "instruction": "lift"}
    counts = [
        [len(episode.observation_steps) for episode in imported(path, tmp_path / path.stem, **mapping)]
        for path in (whole, damaged)
    ]
    assert counts[0] == [count + 1 for count in counts[1]]


def test_damaged_arguments_of_robomimic_are_named(tmp_path: Path) -> None:
    path = robomimic(tmp_path / "lift.hdf5")
    with h5py.File(path, "a") as file:
        file["data"].attrs["env_args"] = "{broken"
    with pytest.raises(EpisodeError, match=r"lift.hdf5: env_args of /data is not a JSON object"):
        imported(path, tmp_path, state=("robot0_eef_pos",), instruction="lift")


def set_rewards(path: Path, *rewards: list[float]) -> Path:
    with h5py.File(path, "a") as file:
        for number, values in enumerate(rewards):
            file[f"data/demo_{number}/rewards"][:] = values
    return path


def test_rewards_other_than_0_and_1_do_not_say_what_a_success_is(tmp_path: Path) -> None:
    fits = {"state": ("robot0_eef_pos",), "instruction": "lift"}
    source = set_rewards(robomimic(tmp_path / "demo.hdf5"), [3.0] * 5)
    with pytest.raises(EpisodeError, match=r"demo_0: rewards from 3 to 3 do not say .*give --success"):
        imported(source, tmp_path, **fits)
    assert not imported(source, tmp_path, **fits, success="none")[0].succeeded


def test_a_success_in_the_last_two_rows_is_paid_once(tmp_path: Path) -> None:
    source = set_rewards(robomimic(tmp_path / "demo.hdf5"), [0, 0, 0, 1, 1])
    first, _ = imported(source, tmp_path, state=("robot0_eef_pos",), instruction="lift")
    assert first.reward.tolist() == [0, 0, 0, 1]


def test_lerobot_s_rewards_of_0_and_1_say_what_succeeded(tmp_path: Path) -> None:
    root = lerobot_2(tmp_path / "pusht")
    for number in (0, 1):
        path = root / f"data/chunk-000/episode_{number:06d}.parquet"
        table: dict[str, list[Any]] = parquet.read_table(path).to_pydict()
        rewards: dict[str, list[Any]] = {"next.reward": [float(flag) for flag in table.pop("next.success")]}
        write_parquet(path, table | rewards)
    assert [episode.succeeded for episode in imported(root, tmp_path, **PIXELS)] == [True, False]


def test_a_damaged_episode_in_the_store_refuses_no_import(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    mapping = ImportMapping(state=("robot0_eef_pos",), instruction="lift")
    import_episodes(source := robomimic(tmp_path / "demo.hdf5"), store, mapping)
    file = store.file(store.select()[0].id)
    os.truncate(file, file.stat().st_size // 2)
    result = import_episodes(source, store, mapping)
    assert (result["episodes"], result["present"]) == (1, 1)


def test_actions_that_cannot_be_read_are_those_of_a_bad_episode(tmp_path: Path) -> None:
    source = robomimic(tmp_path / "demo.hdf5")
    with h5py.File(source, "a") as file:
        del file["data/demo_0/actions"]
        options = {"chunks": ACTIONS[0].shape, "fletcher32": True}
        chunk = file.create_dataset("data/demo_0/actions", data=ACTIONS[0], **options).id
        file.flush()
        at = chunk.get_chunk_info(0).byte_offset
    content = bytearray(source.read_bytes())
    content[at + 3] ^= 0xFF
    source.write_bytes(content)
    store = EpisodeStore(tmp_path / "store", create=True)
    result = import_episodes(source, store, ImportMapping(state=("robot0_eef_pos",), instruction="lift"), skip_bad=True)
    assert (result["episodes"], len(result["skipped"])) == (1, 1)
    assert "demo_0 cannot be read" in result["skipped"][0]["reason"]


@pytest.mark.parametrize("before", ["nothing", "a folder", "a store"])
def test_an_import_that_fails_leaves_no_empty_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: str
) -> None:
    source, path = robomimic(tmp_path / "demo.hdf5"), tmp_path / "new" / "store"
    if before == "a folder":
        path.mkdir(parents=True)
    elif before == "a store":
        EpisodeStore(path, create=True).close()
    with pytest.raises(SystemExit, match="2"):
        main(["data", "import", str(path), "--source", str(source), "--state", "nothing", "--instruction", "lift"])
    assert "nothing" in capsys.readouterr().err
    assert {file.name for file in tmp_path.iterdir()} == {"demo.hdf5"} | ({"new"} if before != "nothing" else set())
    if before == "a folder":
        assert not list(path.iterdir())
    elif before == "a store":
        assert is_store(path)


def test_what_was_imported_before_a_failure_stays(tmp_path: Path) -> None:
    source, path = robomimic(tmp_path / "demo.hdf5"), tmp_path / "store"
    with h5py.File(source, "r+") as file:
        del file["data/demo_1/obs/robot0_eef_pos"]
    words = ["--state", "robot0_eef_pos", "--instruction", "lift", "--camera", "a=agentview_image"]
    with pytest.raises(SystemExit, match="2"):
        main(["data", "import", str(path), "--source", str(source), *words])
    with EpisodeStore(path) as store:
        assert len(store.select()) == 1
