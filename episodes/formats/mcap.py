"""Recorded episodes as MCAP files (mcap.dev), which Foxglove and other viewers of robot logs play.

    /camera/NAME    foxglove.CompressedImage: JPEG, at the times of observations
    /state          vla_rl.State: the robot's state, at the same times
    /step           vla_rl.Step: action, reward, ends, who acted, at the time of every control step
    metadata        "episode": instruction, task, policy, success and the rest of what is not an array

Messages are JSON, as MCAP's well-known schemas allow. Needs the package ``mcap``.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64
from PIL import Image

from episodes.schema import ACTORS, Episode, EpisodeError

JPEG_QUALITY = 90
_NUMBERS = {"type": "array", "items": {"type": "number"}}
_TIME = {"type": "object", "properties": {"sec": {"type": "integer"}, "nsec": {"type": "integer"}}}
# foxglove.CompressedImage has the fields of Foxglove's schema of that name, which viewers recognize.
_SCHEMAS: dict[str, dict[str, Any]] = {
    "foxglove.CompressedImage": {
        "timestamp": _TIME,
        "frame_id": {"type": "string"},
        "data": {"type": "string", "contentEncoding": "base64"},
        "format": {"type": "string"},
    },
    "vla_rl.State": {"state": _NUMBERS},
    "vla_rl.Step": {
        "step": {"type": "integer"},
        "action": _NUMBERS,
        "reward": {"type": "number"},
        "terminated": {"type": "boolean"},
        "truncated": {"type": "boolean"},
        "success": {"type": "boolean"},
        "actor": {"type": "string"},
        "policy_version": {"type": "integer"},
        "shadow_action": _NUMBERS,
        "intervention": {"type": "integer"},
    },
}


def export_mcap(episodes: Iterable[Episode], folder: Path) -> list[Path]:
    """One file ``ID.mcap`` per episode in ``folder``, which is made. Raises EpisodeError without the package."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for episode in episodes:
        paths.append(folder / f"{episode.id}.mcap")
        write_mcap(episode, paths[-1])
    return paths


def write_mcap(episode: Episode, path: Path) -> None:
    """``path`` appears when it is complete."""
    try:
        from mcap.writer import Writer
    except ImportError as error:
        raise EpisodeError("MCAP files need the package mcap. Run: pip install 'vla-rl[mcap]'") from error
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="", library="vla-rl")
        schemas = {name: _register(writer, name, fields) for name, fields in _SCHEMAS.items()}
        topics = {f"/camera/{name}": "foxglove.CompressedImage" for name in episode.images}
        topics |= {"/state": "vla_rl.State", "/step": "vla_rl.Step"}
        channels = {
            topic: writer.register_channel(topic=topic, message_encoding="json", schema_id=schemas[schema])
            for topic, schema in topics.items()
        }
        for time_ns, topic, message in _messages(episode):
            data = json.dumps(message).encode()
            writer.add_message(channels[topic], log_time=time_ns, publish_time=time_ns, data=data)
        writer.add_metadata("episode", _metadata(episode))
        writer.finish()
    partial.replace(path)


def _register(writer: Any, name: str, fields: dict[str, Any]) -> int:
    schema = {"title": name, "type": "object", "properties": fields}
    return int(writer.register_schema(name=name, encoding="jsonschema", data=json.dumps(schema).encode()))


def _messages(episode: Episode) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """(time, topic, message) in the order of the control steps; an observation comes before its step."""
    times_ns = (1e9 * step_times_s(episode)).astype(np.int64)
    row = 0
    for step in range(episode.num_steps + 1):
        time_ns = int(times_ns[step])
        if row < len(episode.observation_steps) and episode.observation_steps[row] == step:
            yield time_ns, "/state", {"state": episode.state[row].tolist()}
            for name, images in episode.images.items():
                yield time_ns, f"/camera/{name}", _image(images[row], name, time_ns)
            row += 1
        if step < episode.num_steps:
            yield time_ns, "/step", _step(episode, step)


def step_times_s(episode: Episode) -> Float64[np.ndarray, "T_and_end"]:
    """Of every control step and of the end: Unix times where they were recorded, else from 0 at ``control_hz``."""
    period_s = 1.0 / episode.control_hz
    if episode.applied_time_s is None:
        return np.arange(episode.num_steps + 1) * period_s
    return np.append(episode.applied_time_s, episode.applied_time_s[-1] + period_s)


def _image(image: np.ndarray, camera: str, time_ns: int) -> dict[str, Any]:
    jpeg = io.BytesIO()
    Image.fromarray(image).save(jpeg, "JPEG", quality=JPEG_QUALITY)
    seconds, nanoseconds = divmod(time_ns, 1_000_000_000)
    return {
        "timestamp": {"sec": seconds, "nsec": nanoseconds},
        "frame_id": camera,
        "data": base64.b64encode(jpeg.getvalue()).decode(),
        "format": "jpeg",
    }


def _step(episode: Episode, step: int) -> dict[str, Any]:
    message: dict[str, Any] = {
        "step": step,
        "action": episode.action[step].tolist(),
        "reward": float(episode.reward[step]),
        "terminated": bool(episode.terminated[step]),
        "truncated": bool(episode.truncated[step]),
        "success": bool(episode.success[step]),
        "actor": ACTORS[episode.actor[step]],
    }
    if episode.step_policy_version is not None:
        message["policy_version"] = int(episode.step_policy_version[step])
    if episode.shadow_action is not None:
        message["shadow_action"] = episode.shadow_action[step].tolist()
    if episode.intervention is not None:
        message["intervention"] = int(episode.intervention[step])
    return message


def _metadata(episode: Episode) -> dict[str, str]:
    names = ("id", "instruction", "task", "split", "seed", "source", "control_hz", "policy_version", "succeeded")
    return {name: str(getattr(episode, name)) for name in names} | {
        f"fingerprint.{name}": version for name, version in episode.fingerprint.items()
    }
