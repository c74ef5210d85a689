"""An episode as the arrays and attributes of a zarr group, and back.

observation_steps state action reward terminated truncated success actor    as in ``Episode``
step_policy_version shadow_action intervention input_time_s applied_time_s  as in ``Episode``, where they are known
images/CAMERA        [L, height, width, 3] uint8       exact images, or instead of them
jpeg/CAMERA/blob     [bytes] uint8                     all JPEG files, one after another
jpeg/CAMERA/offsets  [L + 1] int64                     where each begins
jpeg/CAMERA/size     [2] int32                         height, width
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int64, UInt8

from episodes.schema import ARRAYS, OPTIONAL_ARRAYS, OPTIONAL_ATTRIBUTES, SCHEMA, Episode, EpisodeError
from sims.errors import UserError

Arrays = dict[str, np.ndarray]

ATTRIBUTES = tuple(
    field.name
    for field in dataclasses.fields(Episode)
    if field.name not in (*ARRAYS, *OPTIONAL_ARRAYS, *OPTIONAL_ATTRIBUTES, "images")
)


def pack(episode: Episode, *, jpeg_quality: int | None) -> tuple[Arrays, dict[str, Any]]:
    """``jpeg_quality`` 1-95, or None to keep images exactly."""
    arrays: Arrays = {name: getattr(episode, name) for name in ARRAYS}
    arrays |= {name: array for name in OPTIONAL_ARRAYS if (array := getattr(episode, name)) is not None}
    for camera, frames in episode.images.items():
        if jpeg_quality is None:
            arrays[f"images/{camera}"] = frames
        else:
            blob, offsets = _encode_jpeg(frames, jpeg_quality)
            arrays[f"jpeg/{camera}/blob"], arrays[f"jpeg/{camera}/offsets"] = blob, offsets
            arrays[f"jpeg/{camera}/size"] = np.array(frames.shape[1:3], dtype=np.int32)
    attributes = {name: getattr(episode, name) for name in ATTRIBUTES}
    attributes |= {"operators": list(episode.operators), "action_delay": int(episode.action_delay)}
    attributes |= {"schema": SCHEMA, "seed": int(episode.seed), "fingerprint": dict(episode.fingerprint)}
    return arrays, attributes


def unpack(arrays: Arrays, attributes: Mapping[str, Any]) -> Episode:
    """Exact images are views of ``arrays``; JPEG images are decoded."""
    observations = range(len(arrays["observation_steps"]))
    images = {
        camera: arrays[f"images/{camera}"]
        if f"images/{camera}" in arrays
        else np.stack([frame(arrays, camera, index) for index in observations])
        for camera in frame_sizes(arrays)
    }
    fields: dict[str, Any] = {name: attributes[name] for name in ATTRIBUTES}
    fields["operators"] = tuple(attributes.get("operators", ()))
    fields["action_delay"] = attributes.get("action_delay", 0)
    fields |= {name: arrays[name] for name in ARRAYS} | {name: arrays.get(name) for name in OPTIONAL_ARRAYS}
    return Episode(images=images, **fields)


def frame_sizes(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, int]]:
    """Camera -> (height, width), in the order in which they were recorded."""
    sizes: dict[str, tuple[int, int]] = {}
    for name, array in arrays.items():
        kind, _, rest = name.partition("/")
        if kind == "images":
            sizes[rest] = (array.shape[1], array.shape[2])
        elif kind == "jpeg" and rest.endswith("/size"):
            sizes[rest.removesuffix("/size")] = (int(array[0]), int(array[1]))
    return sizes


def frame_size(
    arrays: Mapping[str, np.ndarray],
    cameras: Sequence[str],
    name: str,
    *,
    expected: tuple[int, int] | None = None,
    error: type[UserError] = EpisodeError,
) -> tuple[int, int]:
    """The one of these cameras; (0, 0) without any. ``error`` where one is missing or of another size."""
    sizes, size = frame_sizes(arrays), expected
    for camera in cameras:
        if camera not in sizes:
            raise error(f"{name}: no camera {camera!r}; recorded are {', '.join(sizes)}")
        size = size or sizes[camera]
        if sizes[camera] != size:
            raise error(
                f"{name}: images of camera {camera!r} are {sizes[camera]} pixels, expected {size}; "
                "give stores, or cameras, of one size"
            )
    return size or (0, 0)


def frame(arrays: Mapping[str, np.ndarray], camera: str, index: int) -> UInt8[np.ndarray, "height width 3"]:
    """The camera's image in observation ``index``, from exact or JPEG images."""
    exact = arrays.get(f"images/{camera}")
    if exact is not None:
        return exact[index]
    from PIL import Image

    begin, end = arrays[f"jpeg/{camera}/offsets"][index : index + 2]
    return np.asarray(Image.open(io.BytesIO(arrays[f"jpeg/{camera}/blob"][begin:end].tobytes())))


def recording_digest(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Of the states and actions."""
    return hashlib.sha256(arrays["state"].tobytes() + arrays["action"].tobytes()).digest()


def _encode_jpeg(
    frames: UInt8[np.ndarray, "L height width 3"], quality: int
) -> tuple[UInt8[np.ndarray, " bytes"], Int64[np.ndarray, " offsets"]]:
    """Blob and offsets. Without chroma subsampling, which is visible in images of 64-128 pixels."""
    from PIL import Image

    blob, offsets = io.BytesIO(), [0]
    for image in frames:
        Image.fromarray(image).save(blob, format="JPEG", quality=quality, subsampling=0)
        offsets.append(blob.tell())
    return np.frombuffer(blob.getvalue(), dtype=np.uint8), np.asarray(offsets, dtype=np.int64)
