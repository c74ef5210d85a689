"""Records shared by all formats: an episode as another project recorded it, and how it becomes one of ours."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float64

from episodes.schema import EpisodeError
from sims.errors import reason

Orientation = Literal["as_recorded", "upside_down", "half_turn"]
Named = Literal["recorded", "end", "none"]


@dataclass(frozen=True, kw_only=True)
class Threshold:
    """Success from the first step on after which ``key`` (its entry ``index``) compares with ``limit`` like that."""

    key: str
    index: int
    sign: str
    limit: float


SuccessRule = Named | Threshold


@dataclass(frozen=True, kw_only=True)
class ImportMapping:
    """How a recording becomes an episode of an environment.

    ``cameras``: camera of the environment -> key of the recording. ``state``: keys that are concatenated to the state.
    ``task``, ``instruction``, ``control_hz``: used instead of the recording's, or where it has none.
    ``action_low``, ``action_high``: actions of the recording that become -1 and 1; one number or one per dimension.
    ``orientation``: images of OpenGL cameras may be "upside_down" (row 0 at the bottom); "half_turn" rotates them by
    180 degrees, as LIBERO's benchmark does with its own. ``image_size``: (height, width) of all cameras; images are
    cropped to its proportions in the middle, as an arm's are. None: as recorded. ``success``: see
    ``success.successes``.
    """

    cameras: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    task: str | None = None
    instruction: str | None = None
    control_hz: float | None = None
    action_low: tuple[float, ...] = (-1.0,)
    action_high: tuple[float, ...] = (1.0,)
    orientation: Orientation = "as_recorded"
    image_size: tuple[int, int] | None = None
    success: SuccessRule = "recorded"


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One episode as its file has it: T steps, with an observation before every action.

    ``name``: file and episode, for messages. ``read(key)``: the array [T, ...] of one of ``keys``. ``outcomes``: those
    of ``keys`` that are about the state after the action. ``final(key)``: the observation after the last action;
    None where the file has none. ``terminated``: whether nothing followed its end, as opposed to a time limit; None
    where the file does not say, and then it is so where the episode succeeded.
    ``instructions``: all that its steps have. ``reward`` and ``control_hz`` are None where the file has none.
    """

    name: str
    read: Callable[[str], np.ndarray]
    keys: tuple[str, ...]
    outcomes: tuple[str, ...] = ()
    final: Callable[[str], np.ndarray] | None = None
    action: Float64[np.ndarray, "T action_dim"]
    reward: Float64[np.ndarray, " T"] | None
    instructions: tuple[str, ...]
    control_hz: float | None
    terminated: bool | None = None

    def column(self, key: str) -> np.ndarray:
        """The array [T, ...] of ``key``. Raises EpisodeError if there is none, or if it has another length."""
        if key not in self.keys:
            raise EpisodeError(f"{self.name} has no {key!r}; it has {', '.join(self.keys)}")
        try:
            array = self.read(key)
        except OSError as error:  # of a damaged image, or of a damaged part of an HDF5 file
            raise EpisodeError(f"{self.name}: {key!r} cannot be read: {reason(error)}") from error
        if len(array) != len(self.action):
            raise EpisodeError(f"{self.name}: {key!r} has {len(array)} steps for {len(self.action)} actions")
        return array


def actions(name: str, array: Any) -> Float64[np.ndarray, "T action_dim"]:
    """Raises EpisodeError where ``array``, the actions of the episode ``name``, is not [T, A] of numbers."""
    found = np.asarray(array)
    if found.ndim != 2 or found.dtype.kind not in "biuf":
        raise EpisodeError(
            f"{name}: its actions are {found.dtype} {list(found.shape)}, not numbers [T, action_dim]; discrete actions "
            "cannot be imported"
        )
    return found.astype(np.float64)


@dataclass(frozen=True, kw_only=True)
class Found:
    """An episode of a source. ``name``: as of its recording. ``load``: raises EpisodeError where it is damaged."""

    name: str
    load: Callable[[], Recording]


def json_object(text: bytes, where: str) -> dict[str, Any]:
    """Raises EpisodeError where ``text`` is none."""
    try:
        found = json.loads(text.decode())
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise EpisodeError(f"{where} is not a JSON object but {text[:60]!r}; download the data set again")
    return found
