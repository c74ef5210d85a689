"""Recorded episodes as MCAP files (mcap.dev), which Foxglove, Rerun and other viewers of robot logs play.

    /camera/NAME    foxglove.CompressedImage in Protobuf: JPEG, at the times of observations
    /state          vla_rl.State: the robot's state, at the same times
    /step           vla_rl.Step: action, reward, ends, who acted, at the time of every control step
    metadata        "episode": instruction, task, policy, success and the rest of what is not an array

The other messages are JSON. Needs the packages of ``vla-rl[mcap]``.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float64, UInt8
from PIL import Image

from episodes.schema import ACTORS, Episode, EpisodeError

JPEG_QUALITY = 90
_NUMBERS = {"type": "array", "items": {"type": "number"}}
_SCHEMAS: dict[str, dict[str, Any]] = {
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
        from foxglove_schemas_protobuf.CompressedImage_pb2 import CompressedImage
        from mcap.writer import Writer
        from mcap_protobuf.schema import register_schema
    except ImportError as error:
        raise EpisodeError("MCAP files need more packages. Run: pip install 'vla-rl[mcap]'") from error
    partial = path.with_suffix(".partial")
    with partial.open("wb") as file:
        writer = Writer(file)
        writer.start(profile="", library="vla-rl")
        image_schema = register_schema(writer, CompressedImage)
        channels = {
            f"/camera/{name}": writer.register_channel(
                topic=f"/camera/{name}", message_encoding="protobuf", schema_id=image_schema
            )
            for name in episode.images
        }
        for topic, schema in (("/state", "vla_rl.State"), ("/step", "vla_rl.Step")):
            channels[topic] = writer.register_channel(
                topic=topic, message_encoding="json", schema_id=_register(writer, schema)
            )
        for time_ns, topic, message in _messages(episode):
            if isinstance(message, bytes):  # a JPEG
                image = CompressedImage(frame_id=topic.rsplit("/", 1)[-1], data=message, format="jpeg")
                image.timestamp.FromNanoseconds(time_ns)
                data = image.SerializeToString()
            else:
                data = json.dumps(message).encode()
            writer.add_message(channels[topic], log_time=time_ns, publish_time=time_ns, data=data)
        writer.add_metadata("episode", _metadata(episode))
        writer.finish()
    partial.replace(path)


def _register(writer: Any, name: str) -> int:
    schema = {"title": name, "type": "object", "properties": _SCHEMAS[name]}
    return int(writer.register_schema(name=name, encoding="jsonschema", data=json.dumps(schema).encode()))


def _messages(episode: Episode) -> Iterator[tuple[int, str, dict[str, Any] | bytes]]:
    """(time, topic, fields or JPEG) in the order of the control steps; an observation comes before its step."""
    times_ns = (1e9 * step_times_s(episode)).astype(np.int64)
    row = 0
    for step in range(episode.num_steps + 1):
        time_ns = int(times_ns[step])
        if row < len(episode.observation_steps) and episode.observation_steps[row] == step:
            yield time_ns, "/state", {"state": episode.state[row].tolist()}
            for name, images in episode.images.items():
                yield time_ns, f"/camera/{name}", _jpeg(images[row])
            row += 1
        if step < episode.num_steps:
            yield time_ns, "/step", _step(episode, step)


def step_times_s(episode: Episode) -> Float64[np.ndarray, "T_and_end"]:
    """Of every control step and of the end: Unix times where they were recorded, else from 0 at ``control_hz``."""
    period_s = 1.0 / episode.control_hz
    if episode.applied_time_s is None:
        return np.arange(episode.num_steps + 1) * period_s
    return np.append(episode.applied_time_s, episode.applied_time_s[-1] + period_s)


def _jpeg(image: UInt8[np.ndarray, "height width 3"]) -> bytes:
    file = io.BytesIO()
    Image.fromarray(image).save(file, "JPEG", quality=JPEG_QUALITY)
    return file.getvalue()


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
