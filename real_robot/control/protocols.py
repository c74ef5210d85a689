"""What a control loop's thread and its sources of actions need of an arm's devices and of a recorder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from real_robot.safety.commands import Measurement, PathPoint, SafeCommand


@runtime_checkable
class JointSource(Protocol):
    """Joint measurements. ``problem``: why ``fresh`` was False."""

    problem: str

    def measure(self) -> Measurement | None:
        """The newest measurement, None before the first."""
        ...

    def fresh(self, max_age_s: float) -> bool:
        """Whether the joints were measured within ``max_age_s``."""
        ...


@runtime_checkable
class CommandSink(Protocol):
    """The controller."""

    def send(self, out: SafeCommand, path: Sequence[PathPoint]) -> None:
        """``path``: the points to come, and the stop that follows if no further command arrives."""
        ...

    def halt(self) -> None:
        """Nothing is sent for some time: a controller that would keep the last velocity gets zero velocity."""
        ...


@runtime_checkable
class Cameras(Protocol):
    """The newest image of every camera, and when the oldest of these was taken [s, monotonic]; None while one is
    missing."""

    def images(self, size: Sequence[int]) -> tuple[Mapping[str, NDArray[np.uint8]], float] | None:
        """``size``: (height, width). UnreadableImages if a camera sent what is none."""
        ...

    def taken_s(self) -> float | None: ...


@runtime_checkable
class EpisodeLog(Protocol):
    """What records episodes: ``real_robot.recorder``. Both methods return at once."""

    def observation(self, step: int, images: Mapping[str, NDArray[np.uint8]], state: NDArray[np.float32]) -> None: ...
    def action(self, action: NDArray[np.float32], actor: int) -> None: ...
