"""One simulator, as a worker process runs it: what an adapter has to provide, in numpy and nothing else.

An adapter's module is imported in two interpreters: the trainer's, for its configuration, and the worker's, which may
be another Python with other pins. At its top level it therefore imports the standard library, numpy and files of this
package that do the same; the simulator itself is imported in ``__init__``.

Everything that is the same for every simulator (the time limit, latched success, standing still after the end,
restoring a state) is done once, in sims/subproc/episode.py.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True, kw_only=True)
class SingleSpec:
    """EnvSpec without rows. ``image_size``: height, width. ``tasks``: their instructions."""

    name: str
    action_dim: int
    state_dim: int
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    control_hz: float
    max_steps: int
    tasks: tuple[str, ...]
    fingerprint: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of one control step. ``truncated`` only for a limit of the simulator's own; ``max_steps`` is kept elsewhere."""

    reward: float
    terminated: bool
    truncated: bool
    success: bool


class SingleEnv(Protocol):
    """One episode at a time. The constructor takes the adapter's configuration dataclass."""

    spec: SingleSpec

    @staticmethod
    def preload(config: Any) -> None:
        """Import and compile what the constructor will need, without starting threads or opening devices.

        Runs once, in the process that workers are forked from: they share what it leaves in memory.
        """
        ...

    def reset(self, *, task: int, seed: int) -> None:
        """Begin an episode that task and seed alone determine. ``seed`` < 2**63."""
        ...

    def step(self, action: np.ndarray) -> Outcome:
        """One control step; action: float32 [A] in [-1, 1]."""
        ...

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        """Write what is seen now into uint8 [cameras, height, width, 3] and float32 [state_dim]."""
        ...

    def close(self) -> None: ...


@runtime_checkable
class DemonstratedSim(Protocol):
    """A simulator that comes with a scripted demonstrator, at least for some of its tasks."""

    @property
    def demonstrates(self) -> bool:
        """Whether there is one for what is configured."""
        ...

    def demonstrate(self) -> np.ndarray:
        """The demonstrator's next action, float [A]; read only, the episode does not advance."""
        ...


def words(name: str) -> str:
    """An instruction from an identifier: 'PickCube-v1' and 'pick_cube' both give 'pick cube'."""
    stem = name.rsplit("/", 1)[-1].split("-v")[0]
    spaced = "".join(f" {c}" if c.isupper() and i and not stem[i - 1].isupper() else c for i, c in enumerate(stem))
    return " ".join(spaced.replace("_", " ").replace("-", " ").lower().split())


def restore(kind: Any, value: Any) -> Any:
    """Undo ``dataclasses.asdict`` and JSON: dictionaries to dataclasses, lists to tuples."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return kind(**{name: restore(hints[name], item) for name, item in value.items()})
    if isinstance(value, list):
        return tuple(restore(Any, item) for item in value)
    return value


def seed32(seed: int) -> int:
    """A seed for libraries that take 32 bits, mixed from all bits of ``seed``."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0])
