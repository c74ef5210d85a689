"""Writes LeRobotDataset version 3.0 (lerobot.py describes the layout and reads it).

Features: observation.state, observation.images.<camera>, action, next.reward, next.success, next.done. The observation
after the last action is one more frame, whose action repeats the last one and after which nothing is rewarded.
Images: H.264 (4:2:0, CRF 12: mean error of a colour about 1 to 3 of 255), or PNG inside the tables, which is exact.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import subprocess
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from episodes.schema import Episode, EpisodeError
from sims.video import full_disk

EPISODES_PER_FILE = 50  # videos are decoded from their beginning
FILES_PER_CHUNK = 1000
DATA = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
EPISODES = "meta/episodes/chunk-000/file-000.parquet"
TASKS_INDEX = "__index_level_0__"
_Video = Callable[[np.ndarray], None]  # takes frames [n, height, width, 3]


@dataclass
class _Written:
    """What meta/ tells about the frames so far. ``tasks``: instruction -> index. ``stats``: by feature."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    tasks: dict[str, int] = field(default_factory=dict)
    stats: dict[str, _Statistics] = field(default_factory=dict)
    frames: int = 0


def write_lerobot(episodes: Iterator[Episode], root: Path, *, video: bool = True) -> None:
    """``root``: the folder to make. Raises EpisodeError where pyarrow is missing or a video cannot be written."""
    written, info = _Written(), dict[str, Any]()
    for number in itertools.count():
        group = itertools.islice(episodes, EPISODES_PER_FILE)
        first = next(group, None)
        if first is None:
            break
        info = info or _info(first, video=video)
        place = {"chunk_index": number // FILES_PER_CHUNK, "file_index": number % FILES_PER_CHUNK}
        with contextlib.ExitStack() as opened:
            videos = {}
            for camera, frames in first.images.items() if video else ():
                path = root / VIDEO.format(video_key=f"observation.images.{camera}", **place)
                videos[camera] = opened.enter_context(_mp4(path, frames.shape[1:3], hz=first.control_hz))
            _write_group(itertools.chain([first], group), root, place, written, videos)
    total = {"total_episodes": len(written.rows), "total_frames": written.frames, "total_tasks": len(written.tasks)}
    _write_json(root / "meta/info.json", info | total | {"splits": {"train": f"0:{len(written.rows)}"}})
    _write_json(root / "meta/stats.json", {name: stats.summary() for name, stats in written.stats.items()})
    _write_table(root / EPISODES, {key: [row[key] for row in written.rows] for key in written.rows[0]})
    texts, numbers = list(written.tasks), list(written.tasks.values())
    _write_table(root / "meta/tasks.parquet", {"task_index": numbers, TASKS_INDEX: texts}, pandas_index=TASKS_INDEX)


def _write_group(
    group: Iterable[Episode], root: Path, place: dict[str, int], written: _Written, videos: Mapping[str, _Video]
) -> None:
    """One data file, whose images go into ``videos``, by camera, if there are any. One episode is in memory at once."""
    tables, in_file = [], 0
    for episode in group:
        hz = episode.control_hz
        length, number = len(episode.state), len(written.rows)
        task = written.tasks.setdefault(episode.instruction, len(written.tasks))
        row: dict[str, Any] = {"episode_index": number, "tasks": [episode.instruction], "length": length}
        row |= {f"data/{key}": value for key, value in place.items()}
        row |= {"dataset_from_index": written.frames, "dataset_to_index": written.frames + length}
        for key in (f"videos/observation.images.{camera}" for camera in videos):
            row |= {f"{key}/{name}": value for name, value in place.items()}
            row |= {f"{key}/from_timestamp": in_file / hz, f"{key}/to_timestamp": (in_file + length) / hz}
        row |= {f"meta/episodes/{key}": 0 for key in place}
        columns = _columns(episode, number=number, first=written.frames, task=task)
        for name in ("observation.state", "action"):
            written.stats.setdefault(name, _Statistics()).add(np.asarray(columns[name], dtype=np.float64))
        for camera, frames in episode.images.items():
            name = f"observation.images.{camera}"
            for frame in frames:
                written.stats.setdefault(name, _Statistics()).add(frame.reshape(-1, 3) / 255.0, shape=(3, 1, 1))
            if videos:
                videos[camera](frames)
            else:
                columns[name] = [{"bytes": _png(frame), "path": None} for frame in frames]
        tables.append(columns)
        written.rows.append(row)
        written.frames, in_file = written.frames + length, in_file + length
    _write_table(root / DATA.format(**place), {key: [v for table in tables for v in table[key]] for key in tables[0]})


def _columns(episode: Episode, *, number: int, first: int, task: int) -> dict[str, list[Any]]:
    """A row per observation."""
    length, steps = len(episode.state), episode.num_steps
    beyond = length - steps
    ended = np.arange(length) == steps - 1
    ended[-1] = True
    return {
        "observation.state": _rows(episode.state),
        "action": _rows(np.concatenate([episode.action, episode.action[-1:].repeat(beyond, axis=0)])),
        "next.reward": np.append(episode.reward, np.zeros(beyond, np.float32)).tolist(),
        "next.success": np.append(episode.success, np.zeros(beyond, np.bool_)).tolist(),
        "next.done": ended.tolist(),
        "timestamp": (np.arange(length) / episode.control_hz).tolist(),
        "frame_index": list(range(length)),
        "episode_index": [number] * length,
        "index": list(range(first, first + length)),
        "task_index": [task] * length,
    }


def _rows(values: Float32[np.ndarray, "L dims"]) -> list[Any]:
    """A row per step. LeRobot reads a feature of shape [1] as a number, not as a list of one."""
    return list(values[:, 0] if values.shape[1] == 1 else values)


def _info(episode: Episode, *, video: bool) -> dict[str, Any]:
    hz = int(episode.control_hz) if float(episode.control_hz).is_integer() else episode.control_hz
    whole = ("frame_index", "episode_index", "index", "task_index")
    features: dict[str, Any] = {
        "observation.state": {"dtype": "float32", "shape": [episode.state.shape[1]], "names": None},
        "action": {"dtype": "float32", "shape": [episode.action.shape[1]], "names": None},
        "next.reward": {"dtype": "float32", "shape": [1], "names": None},
        "next.success": {"dtype": "bool", "shape": [1], "names": None},
        "next.done": {"dtype": "bool", "shape": [1], "names": None},
        "timestamp": {"dtype": "float32", "shape": [1], "names": None},
        **{name: {"dtype": "int64", "shape": [1], "names": None} for name in whole},
    }
    for camera, frames in episode.images.items():
        height, width = frames.shape[1:3]
        feature: dict[str, Any] = {
            "dtype": "image",
            "shape": [height, width, 3],
            "names": ["height", "width", "channels"],
        }
        if video:
            feature["dtype"] = "video"
            feature["info"] = {
                "video.height": height, "video.width": width, "video.channels": 3, "video.codec": "h264",
                "video.pix_fmt": "yuv420p", "video.fps": hz, "video.is_depth_map": False, "has_audio": False,
            }  # fmt: skip
        features[f"observation.images.{camera}"] = feature
    return {
        "codebase_version": "v3.0",
        "robot_type": None,
        "fps": hz,
        "chunks_size": FILES_PER_CHUNK,
        "data_files_size_in_mb": 100,
        "video_files_size_in_mb": 200,
        "data_path": DATA,
        "video_path": VIDEO if video else None,
        "features": features,
    }


class _Statistics:
    """Smallest, largest, mean and std per entry of rows that are added in parts."""

    def __init__(self) -> None:
        self.count = 0
        self.shape: tuple[int, ...] = (-1,)
        self.low, self.high, self.sum, self.squares = np.inf, -np.inf, 0.0, 0.0

    def add(self, rows: np.ndarray, shape: tuple[int, ...] = (-1,)) -> None:
        self.count, self.shape = self.count + len(rows), shape
        self.low, self.high = np.minimum(self.low, rows.min(0)), np.maximum(self.high, rows.max(0))
        self.sum, self.squares = self.sum + rows.sum(0), self.squares + np.square(rows).sum(0)

    def summary(self) -> dict[str, Any]:
        mean = self.sum / self.count
        std = np.sqrt(np.maximum(self.squares / self.count - np.square(mean), 0.0))
        values = {"min": self.low, "max": self.high, "mean": mean, "std": std}
        shaped = {name: np.asarray(value).reshape(self.shape).tolist() for name, value in values.items()}
        return shaped | {"count": [self.count]}


def _png(frame: np.ndarray) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(frame).save(out, "PNG")
    return out.getvalue()


@contextlib.contextmanager
def _mp4(path: Path, size: Sequence[int], *, hz: float) -> Iterator[_Video]:
    """Frames of ``size`` (height, width), one after another, with a keyframe every second one: they are read in any
    order. Raises EpisodeError where it cannot be written, OSError of a full disk where that is why."""
    import imageio_ffmpeg

    path.parent.mkdir(parents=True, exist_ok=True)
    height, width = size
    if height % 2 or width % 2:
        raise EpisodeError(f"videos need even sizes, images are {height} x {width}; export with --to lerobot-images")
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-y", "-loglevel", "error", "-f", "rawvideo", "-pix_fmt", "rgb24"]
    command += ["-s", f"{width}x{height}", "-r", str(hz), "-i", "-", "-c:v", "libx264", "-pix_fmt", "yuv420p"]
    command += ["-crf", "12", "-g", "2", "-bf", "0", "-movflags", "+faststart", str(path)]
    with tempfile.TemporaryFile() as said, subprocess.Popen(command, stdin=subprocess.PIPE, stderr=said) as ffmpeg:
        pipe = ffmpeg.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError), pipe:  # it says below why it ended
            yield lambda frames: pipe.writelines(frame.tobytes() for frame in frames)
        if ffmpeg.wait() != 0:
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
            raise full_disk(path, text) or EpisodeError(f"{path}: ffmpeg could not write it: {text}")


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=4))


SCALARS = {"timestamp": "float32", "next.reward": "float32"}


def _write_table(path: Path, columns: dict[str, list[Any]], *, pandas_index: str | None = None) -> None:
    """``pandas_index``: the column that pandas, with which LeRobot reads tasks, takes for the index."""
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise EpisodeError("writing parquet needs pyarrow. Run: pip install 'vla-rl[import]'") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({key: pa.array(values, type=SCALARS.get(key)) for key, values in columns.items()})
    if pandas_index is not None:
        kinds = {name: ("unicode", "object") if name == pandas_index else ("int64", "int64") for name in columns}
        described = [
            {"name": None if name == pandas_index else name, "field_name": name, "pandas_type": kind, "numpy_type": of}
            | {"metadata": None}
            for name, (kind, of) in kinds.items()
        ]
        index = {"index_columns": [pandas_index], "column_indexes": [], "columns": described}
        table = table.replace_schema_metadata({"pandas": json.dumps(index | {"pandas_version": "2.2.0"})})
    parquet.write_table(table, path)
