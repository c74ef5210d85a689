"""LeRobot's data sets, versions 2.x (a file per episode) and 3.0 (many episodes in a file).

    meta/info.json      codebase_version, fps, features {key: {dtype, shape}}, data_path, video_path, chunks_size (2.x)
    2.x  meta/episodes.jsonl, meta/tasks.jsonl, data/chunk-000/episode_000000.parquet,
         videos/chunk-000/<key>/episode_000000.mp4
    3.0  meta/episodes/chunk-000/file-000.parquet, meta/tasks.parquet, data/chunk-000/file-000.parquet,
         videos/<key>/chunk-000/file-000.mp4, where an episode's frames begin at videos/<key>/from_timestamp

(huggingface.co/docs/lerobot, "LeRobotDataset v3.0".)
"""

from __future__ import annotations

import functools
import io
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from episodes.formats.importer import Recording
from episodes.schema import EpisodeError


def read_lerobot(root: Path) -> Iterator[Recording]:
    """Every episode in order. Raises EpisodeError where a file is missing or of another version."""
    info = json.loads((root / "meta" / "info.json").read_text())
    version = str(info.get("codebase_version", ""))
    if not version.startswith(("v2.", "v3.")):
        raise EpisodeError(f"{root}: LeRobot version {version!r}; 2.x and 3.0 can be read")
    packed = version.startswith("v3.")
    tasks = _tasks(root, packed=packed)
    for episode in _episodes(root, packed=packed):
        yield _recording(root, info, episode, tasks, packed=packed)


def _recording(
    root: Path, info: dict[str, Any], episode: dict[str, Any], tasks: dict[int, str], *, packed: bool
) -> Recording:
    number = int(episode["episode_index"])
    places = {
        "episode_chunk": number // int(info.get("chunks_size", 1000)),
        "episode_index": number,
        "chunk_index": episode.get("data/chunk_index", 0),
        "file_index": episode.get("data/file_index", 0),
    }
    table = _parquet(root / info["data_path"].format(**places))
    rows = np.flatnonzero(np.asarray(table["episode_index"]) == number)
    kinds = {key: feature["dtype"] for key, feature in info["features"].items()}
    features = {key: kind for key, kind in kinds.items() if key in table or kind == "video"}

    def read(key: str) -> np.ndarray:
        if features[key] == "video":
            video = places | {"video_key": key}
            if packed:
                video |= {name: episode[f"videos/{key}/{name}"] for name in ("chunk_index", "file_index")}
            path = root / info["video_path"].format(**video)
            first = round(float(episode.get(f"videos/{key}/from_timestamp", 0.0)) * info["fps"])
            height, width = _picture_size(info["features"][key])
            return _frames(path, first=first, count=len(rows), height=height, width=width)
        values = [table[key][row] for row in rows]
        return np.stack([_picture(value, root) for value in values] if features[key] == "image" else values)

    reward = None  # recorded rewards are not on one scale; success is
    if "next.success" in table:
        reward = np.array([float(np.any(table["next.success"][row])) for row in rows])
    named = episode.get("tasks")
    instruction = str(named[0]) if named is not None and len(named) else tasks.get(int(table["task_index"][rows[0]]))
    return Recording(
        where=f"{root.name}: episode {number}",
        read=read,
        keys=tuple(features),
        action=np.stack([table["action"][row] for row in rows]).astype(np.float64),
        reward=reward,
        instruction=instruction,
        control_hz=float(info["fps"]),
    )


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
    words = table.get("task", table.get("__index_level_0__"))
    return {} if words is None else {int(i): str(text) for i, text in zip(table["task_index"], words, strict=True)}


def _json_lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        raise EpisodeError(f"{path} is missing, so this is not a whole LeRobot data set")
    return [json.loads(line) for line in path.read_text().splitlines() if line]


@functools.lru_cache(maxsize=1)  # in 3.0 the next episode mostly lies in the same file
def _parquet(path: Path) -> dict[str, Any]:
    """Columns as lists of Python values."""
    try:
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise EpisodeError("reading parquet needs pyarrow. Run: pip install 'vla-rl[import]'") from error
    if not path.is_file():
        raise EpisodeError(f"{path} is missing, so this is not a whole LeRobot data set")
    columns: dict[str, Any] = parquet.read_table(path).to_pydict()
    return columns


def _picture_size(feature: dict[str, Any]) -> tuple[int, int]:
    """height, width; ``names`` says which of the shape's numbers they are."""
    names, shape = list(feature.get("names") or ("height", "width", "channels")), feature["shape"]
    return int(shape[names.index("height")]), int(shape[names.index("width")])


def _picture(value: dict[str, Any], root: Path) -> np.ndarray:
    from PIL import Image

    source = io.BytesIO(value["bytes"]) if value.get("bytes") else root / value["path"]
    with Image.open(source) as image:
        return np.asarray(image.convert("RGB"))


def _frames(path: Path, *, first: int, count: int, height: int, width: int) -> np.ndarray:
    """uint8 [count, height, width, 3] from frame ``first`` on; decoded from the beginning, so the frame is exact."""
    import imageio_ffmpeg

    if not path.is_file():
        raise EpisodeError(f"{path} is missing, so this is not a whole LeRobot data set")
    chosen = f"select=between(n\\,{first}\\,{first + count - 1})"
    command = [imageio_ffmpeg.get_ffmpeg_exe(), "-loglevel", "error", "-i", str(path), "-vf", chosen]
    command += ["-fps_mode", "passthrough", "-frames:v", str(count), "-f", "rawvideo", "-pix_fmt", "rgb24", "-"]
    done = subprocess.run(command, capture_output=True, check=False)
    whole = count * height * width * 3
    if done.returncode != 0 or len(done.stdout) != whole:
        said = done.stderr.decode(errors="replace").strip() or f"{len(done.stdout)} bytes instead of {whole}"
        raise EpisodeError(f"{path}: frames {first} to {first + count - 1} cannot be read: {said}")
    return np.frombuffer(done.stdout, np.uint8).reshape(count, height, width, 3)
