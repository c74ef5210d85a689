"""Records shared by all formats: an episode as another project recorded it, and how it becomes one of ours."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float64

Orientation = Literal["as_recorded", "upside_down", "half_turn"]


@dataclass(frozen=True, kw_only=True)
class ImportMapping:
    """How a recording becomes an episode of an environment.

    ``cameras``: camera of the environment -> key of the recording. ``state``: keys that are concatenated to the state.
    ``task``, ``instruction``, ``control_hz``: used instead of the recording's, or where it has none.
    ``action_low``, ``action_high``: actions of the recording that become -1 and 1; one number or one per dimension.
    ``orientation``: images of OpenGL cameras may be "upside_down" (row 0 at the bottom); "half_turn" rotates them by
    180 degrees, as LIBERO's benchmark does with its own.
    """

    cameras: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    task: str | None = None
    instruction: str | None = None
    control_hz: float | None = None
    action_low: tuple[float, ...] = (-1.0,)
    action_high: tuple[float, ...] = (1.0,)
    orientation: Orientation = "as_recorded"


@dataclass(frozen=True, kw_only=True, eq=False)
class Recording:
    """One episode as its file has it: T steps, with an observation before every action.

    ``name``: file and episode, for messages. ``read(key)``: the array [T, ...] of one of ``keys``.
    ``reward``, ``instruction`` and ``control_hz`` are None where the file has none.
    """

    name: str
    read: Callable[[str], np.ndarray]
    keys: tuple[str, ...]
    action: Float64[np.ndarray, "T action_dim"]
    reward: Float64[np.ndarray, " T"] | None
    instruction: str | None
    control_hz: float | None
