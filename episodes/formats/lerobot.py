"""Reads LeRobot's data sets, versions 2.x (a file per episode) and 3.0 (many episodes in a file).

    meta/info.json      codebase_version, fps, features {key: {dtype, shape}}, data_path, video_path, chunks_size (2.x)
    2.x  meta/episodes.jsonl, meta/tasks.jsonl, data/chunk-000/episode_000000.parquet,
         videos/chunk-000/<key>/episode_000000.mp4
    3.0  meta/episodes/chunk-000/file-000.parquet, meta/tasks.parquet, data/chunk-000/file-000.parquet,
         videos/<key>/chunk-000/file-000.mp4, where an episode's frames begin at videos/<key>/from_timestamp

(huggingface.co/docs/lerobot, "LeRobotDataset v3.0".)
"""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from episodes.formats.recording import Found, Recording, actions, json_object
from episodes.formats.video_frames import VideoFrames
from episodes.schema import EpisodeError

ACTIONS = ("action", "actions")  # the second in physical-intelligence/libero


def is_lerobot(path: Path) -> bool:
    return (path / "meta" / "info.json").is_file()


def find_lerobot(root: Path) -> Iterator[Found]:
    """Every episode in order. Raises EpisodeError where the data set is of another version, or its meta is damaged."""
    path = root / "meta" / "info.json"
    info = json_object(path.read_bytes(), f"{path}")
    version = str(info.get("codebase_version", ""))
    if not version.startswith(("v2.", "v3.")):
        raise EpisodeError(f"{root}: LeRobot version {version!r}; 2.x and 3.0 can be read")
    if missing := [key for key in ("fps", "features", "data_path") if key not in info]:
        raise EpisodeError(f"{path} has no {', '.join(missing)}; download the data set again")
    packed = version.startswith("v3.")
    with _complete(root), contextlib.closing(VideoFrames()) as videos:
        tasks = _tasks(root, packed=packed)
        data_set = _DataSet(root=root, info=info, tasks=tasks, packed=packed, videos=videos)
        for episode in _episodes(root, packed=packed):
            yield Found(name=data_set.name(episode), load=functools.partial(data_set.recording, episode))


@contextlib.contextmanager
def _complete(root: Path) -> Iterator[None]:
    """EpisodeError in place of the KeyError of what meta/ lacks."""
    try:
        yield
    except KeyError as error:
        raise EpisodeError(f"{root}: its meta has no {error}, which is needed; download the data set again") from error


@dataclass(frozen=True, kw_only=True)
class _DataSet:
    """A data set's folder, its meta/info.json and its instructions by task index. ``packed``: version 3.0."""

    root: Path
    info: dict[str, Any]
    tasks: dict[int, str]
    packed: bool
    videos: VideoFrames

    def name(self, episode: dict[str, Any]) -> str:
        return f"{self.root.name}: episode {int(episode['episode_index'])}"

    def recording(self, episode: dict[str, Any]) -> Recording:
        """``episode``: its line of meta/episodes."""
        with _complete(self.root):
            return self._recording(episode)

    def _recording(self, episode: dict[str, Any]) -> Recording:
        number = int(episode["episode_index"])
        places = self._places(episode)
        table = _parquet(self.root / self.info["data_path"].format(**places))
        action = next((key for key in ACTIONS if key in table), None)
        if action is None or "episode_index" not in table:
            raise EpisodeError(
                f"{self.root.name}: episode {number}: the columns {' or '.join(ACTIONS)} and episode_index are needed; "
                f"there are {', '.join(table)}"
            )
        rows = np.flatnonzero(np.asarray(table["episode_index"]) == number).tolist()
        if not rows:
            raise EpisodeError(f"{self.root.name}: episode {number} has no rows; download the data set again")
        if "timestamp" in table:
            self._check_times(number, [float(np.asarray(table["timestamp"][row]).item()) for row in rows])
        kinds = {key: feature["dtype"] for key, feature in self.info["features"].items()}
        features = {key: kind for key, kind in kinds.items() if key in table or kind == "video"}

        def read(key: str) -> np.ndarray:
            if features[key] == "video":
                with _complete(self.root):
                    return self._video(key, episode, places, count=len(rows))
            values = [table[key][row] for row in rows]
            if features[key] == "image":
                values = [_decode_image(value, self.root) for value in values]
            return np.stack(values)

        told = next((key for key in ("next.success", "next.reward") if key in table), None)
        reward = None if told is None else np.array([float(np.max(table[told][row])) for row in rows])
        return Recording(
            name=self.name(episode),
            read=read,
            keys=tuple(features),
            outcomes=tuple(key for key in features if key.startswith("next.")),
            action=actions(self.name(episode), self._rows(action, table, rows)),
            reward=reward,
            instructions=self._instructions(episode, table, rows),
            control_hz=float(self.info["fps"]),
        )

    def _rows(self, action: str, table: dict[str, Any], rows: list[int]) -> np.ndarray:
        """The actions of these rows: of a feature of shape [1] a plain column has numbers, not lists of one."""
        found = np.stack([table[action][row] for row in rows])
        single = self.info["features"].get(action, {}).get("shape") == [1]
        return found[:, None] if single and found.ndim == 1 and found.dtype.kind == "f" else found

    def _check_times(self, number: int, seconds: list[float]) -> None:
        """EpisodeError where rows are not one control step apart: images are read by their number."""
        steps = np.array(seconds) * self.info["fps"]
        wrong = np.flatnonzero(np.abs(steps - np.arange(len(steps))) > 0.5)
        if len(wrong):
            raise EpisodeError(
                f"{self.root.name}: episode {number}: row {wrong[0]} is of {seconds[wrong[0]]:g} s, expected is "
                f"{wrong[0] / self.info['fps']:g} s at {self.info['fps']} steps per second: rows that were dropped, or "
                "another rate, cannot be imported"
            )

    def _instructions(self, episode: dict[str, Any], table: dict[str, Any], rows: list[int]) -> tuple[str, ...]:
        named = episode.get("tasks")
        if named is None or not len(named):
            named = [self.tasks.get(int(table["task_index"][row])) for row in rows]
        return tuple(dict.fromkeys(str(one) for one in named if one is not None))

    def _places(self, episode: dict[str, Any]) -> dict[str, Any]:
        """The values of the fields in ``data_path`` and ``video_path``."""
        number = int(episode["episode_index"])
        return {
            "episode_chunk": number // int(self.info.get("chunks_size", 1000)),
            "episode_index": number,
            "chunk_index": episode.get("data/chunk_index", 0),
            "file_index": episode.get("data/file_index", 0),
        }

    def _video(
        self, key: str, episode: dict[str, Any], places: dict[str, Any], *, count: int
    ) -> UInt8[np.ndarray, "count height width 3"]:
        fields = places | {"video_key": key}
        if self.packed:
            fields |= {name: episode[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
        path = self.root / self.info["video_path"].format(**fields)
        first = round(float(episode.get(f"videos/{key}/from_timestamp", 0.0)) * self.info["fps"])
        height, width = _image_size(self.info["features"][key])
        return self.videos.read(key, path, first=first, count=count, height=height, width=width)


def _episodes(root: Path, *, packed: bool) -> Iterator[dict[str, Any]]:
    if not packed:
        yield from _json_lines(root / "meta" / "episodes.jsonl")
        return
    for path in sorted((root / "meta" / "episodes").glob("*/*.parquet")):
        table = _parquet(path)
        for row in range(len(table["episode_index"])):
            yield {key: column[row] for key, column in table.items()}


def _tasks(root: Path, *, packed: bool) -> dict[int, str]:
    if not packed:
        return {int(line["task_index"]): line["task"] for line in _json_lines(root / "meta" / "tasks.jsonl")}
    table = _parquet(root / "meta" / "tasks.parquet")
    texts = table.get("task", table.get("__index_level_0__"))
    return {} if texts is None else {int(i): str(text) for i, text in zip(table["task_index"], texts, strict=True)}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise EpisodeError(f"{path} is missing, so the LeRobot data set is not complete")
    lines = enumerate(path.read_bytes().split(b"\n"), start=1)
    return [json_object(line, f"{path}, line {number}") for number, line in lines if line.strip()]


@functools.lru_cache(maxsize=1)  # in 3.0 the next episode is mostly in the same file
def _parquet(path: Path) -> dict[str, Any]:
    """Columns as lists of Python values."""
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise EpisodeError("reading parquet needs pyarrow. Run: pip install 'vla-rl[import]'") from error
    if not path.is_file():
        raise EpisodeError(f"{path} is missing, so the LeRobot data set is not complete")
    try:
        columns: dict[str, Any] = parquet.read_table(path).to_pydict()
    except (OSError, ValueError) as error:  # pyarrow's errors of a damaged file
        raise EpisodeError(f"{path} cannot be read as parquet: {error}; download it again") from error
    return columns


def _image_size(feature: dict[str, Any]) -> tuple[int, int]:
    """Height and width; ``names`` says where they are in ``shape``."""
    names, shape = list(feature.get("names") or ("height", "width", "channels")), feature["shape"]
    return int(shape[names.index("height")]), int(shape[names.index("width")])


def _decode_image(value: dict[str, Any], root: Path) -> UInt8[np.ndarray, "height width 3"]:
    from PIL import Image

    source = io.BytesIO(value["bytes"]) if value.get("bytes") else root / value["path"]
    with Image.open(source) as image:
        return np.asarray(image.convert("RGB"))
