"""An episode as the arrays and attributes of a zarr group, and back.

observation_steps state action reward terminated truncated success actor    as in ``Episode``
step_policy_version shadow_action intervention input_time_s applied_time_s  as in ``Episode``, where they are known
images/CAMERA        [L, height, width, 3] uint8
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import UInt8

from episodes.schema import ARRAYS, OPTIONAL_ARRAYS, OPTIONAL_ATTRIBUTES, SCHEMA, Episode, EpisodeError
from sims.errors import UserError

Arrays = dict[str, np.ndarray]

_IMAGES = "images/"

ATTRIBUTES = tuple(
    field.name
    for field in dataclasses.fields(Episode)
    if field.name not in (*ARRAYS, *OPTIONAL_ARRAYS, *OPTIONAL_ATTRIBUTES, "images")
)


def pack(episode: Episode) -> tuple[Arrays, dict[str, Any]]:
    arrays: Arrays = {name: getattr(episode, name) for name in ARRAYS}
    arrays |= {name: array for name in OPTIONAL_ARRAYS if (array := getattr(episode, name)) is not None}
    arrays |= {_IMAGES + camera: frames for camera, frames in episode.images.items()}
    attributes = {name: getattr(episode, name) for name in ATTRIBUTES}
    attributes |= {"operators": list(episode.operators), "action_delay": int(episode.action_delay)}
    attributes |= {"schema": SCHEMA, "seed": int(episode.seed), "fingerprint": dict(episode.fingerprint)}
    return arrays, attributes


def unpack(arrays: Arrays, attributes: Mapping[str, Any]) -> Episode:
    """The episode's arrays are those of ``arrays``."""
    images = {camera: arrays[_IMAGES + camera] for camera in frame_sizes(arrays)}
    fields: dict[str, Any] = {name: attributes[name] for name in ATTRIBUTES}
    fields["operators"] = tuple(attributes.get("operators", ()))
    fields["action_delay"] = attributes.get("action_delay", 0)
    fields |= {name: arrays[name] for name in ARRAYS} | {name: arrays.get(name) for name in OPTIONAL_ARRAYS}
    return Episode(images=images, **fields)


def frame_sizes(arrays: Mapping[str, np.ndarray]) -> dict[str, tuple[int, int]]:
    """Camera -> (height, width), in the order in which they were recorded."""
    return {
        name.removeprefix(_IMAGES): (array.shape[1], array.shape[2])
        for name, array in arrays.items()
        if name.startswith(_IMAGES)
    }


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
    """The camera's image in observation ``index``."""
    return arrays[_IMAGES + camera][index]


def recording_digest(arrays: Mapping[str, np.ndarray]) -> bytes:
    """Of the states and actions."""
    return hashlib.sha256(arrays["state"].tobytes() + arrays["action"].tobytes()).digest()
