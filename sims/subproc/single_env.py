"""The interface of a simulator that runs in a worker process, one environment per process.

An adapter's module is imported in two interpreters: the trainer's, for its configuration, and the worker's, which may
be another Python with other package versions. At its top level it therefore imports the standard library, numpy and
files of this package that do the same; the simulator itself is imported in ``__init__``.

What is the same for every simulator (time limit, success that persists, finished episodes, restoring a state) is in
sims/subproc/episode.py.
"""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from sims.errors import UserError

# sparse: 1 for success, which ends the episode. shaped: the simulator's own, which can pay more for not succeeding.
Reward = Literal["sparse", "shaped"]


@dataclass(frozen=True, kw_only=True)
class SingleSpec:
    """EnvSpec of one environment.

    ``image_size``: (height, width) in pixels. ``tasks``: distinct names. ``instructions``: what a policy is told in
    each of them; empty: the names. ``fingerprint``: versions that a result depends on. Raises UserError.
    """

    name: str
    action_dim: int
    state_dim: int
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    control_hz: float
    max_steps: int
    tasks: tuple[str, ...]
    instructions: tuple[str, ...] = ()
    fingerprint: Mapping[str, str]

    def __post_init__(self) -> None:
        if len(set(self.tasks)) != len(self.tasks):
            raise UserError(f"{self.name} has two tasks of one name, which results would not tell apart: {self.tasks}")
        if self.instructions and len(self.instructions) != len(self.tasks):
            raise UserError(f"{self.name} has {len(self.tasks)} tasks and {len(self.instructions)} instructions")

    @property
    def task_instructions(self) -> tuple[str, ...]:
        """What a policy is told, by task."""
        return self.instructions or self.tasks


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one control step. ``terminated``: besides success, which ends an episode in any case. ``truncated``: a
    limit of the simulator's own; ``max_steps`` is applied outside.

    ``reward`` None is the sparse one: 1 for success, otherwise 0.
    """

    success: bool
    terminated: bool = False
    truncated: bool = False
    reward: float | None = None


@runtime_checkable
class SingleEnv(Protocol):
    """One episode at a time. The constructor takes the adapter's configuration dataclass.

    ``max_steps`` and the persistence of success are applied outside. ``reset`` is called before anything else.
    """

    spec: SingleSpec

    @staticmethod
    def preload(config: Any) -> SingleEnv | None:
        """Import and compile what the constructor needs, without starting threads or opening devices.

        Runs once, in the process that workers are forked from; they share its memory until they write to it. If the
        constructor opens no device, return an environment with its models loaded: every worker continues with its copy
        of it. Otherwise None: every worker calls the constructor.
        """
        ...

    def reset(self, *, task: int, seed: int) -> None:
        """Begin the episode that ``task`` and ``seed`` (0 <= seed < 2**63) alone determine."""
        ...

    def step(self, action: np.ndarray) -> StepResult:
        """One control step; action: float32 [A], which callers keep in [-1, 1]."""
        ...

    def observe(self, *, images: np.ndarray, state: np.ndarray) -> None:
        """Write the present observation into uint8 [cameras, height, width, 3] and float32 [state_dim]."""
        ...

    def close(self) -> None: ...


# The class itself, which other interpreters import by name. At run time attributes of a protocol can be checked on
# instances only.
if TYPE_CHECKING:
    SimulatorClass = type[SingleEnv]
else:
    SimulatorClass = type


@runtime_checkable
class DemonstratedSim(Protocol):
    """A simulator with a scripted expert, at least for some of its tasks."""

    @property
    def demonstrates(self) -> bool:
        """Whether there is an expert for the configured task."""
        ...

    def demonstrate(self) -> np.ndarray:
        """The expert's next action, float [A]; the episode does not advance."""
        ...


def reward_fingerprint(config: Any) -> dict[str, str]:
    """What a fingerprint says of the reward: nothing where it is sparse, as it is where there is no choice."""
    reward = getattr(config, "reward", "sparse")
    return {} if reward == "sparse" else {"reward": reward}


def instruction_from(name: str) -> str:
    """Made from an identifier: 'PickCube-v1', 'my_package.envs:PickCube-v1' and 'pick_cube' all give 'pick cube'."""
    stem = re.sub(r"^.*[/:]|-v\d+$", "", name)
    spaced = "".join(f" {c}" if c.isupper() and i and not stem[i - 1].isupper() else c for i, c in enumerate(stem))
    return " ".join(spaced.replace("_", " ").replace("-", " ").lower().split())


def check_plain(value: Any, name: str) -> None:
    """Raises ValueError where a worker would get another value of the untyped setting ``name``, as JSON makes it."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(f"{name}: keys must be text, got {key!r}; the worker would get it as text")
            check_plain(item, f"{name}.{key}")
    elif isinstance(value, list):
        for i, item in enumerate(value):
            check_plain(item, f"{name}.{i}")
    elif value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"{name} must be text, a number, true, false, null, a list or a mapping, got {value!r}")


def restore(kind: Any, value: Any) -> Any:
    """Inverse of ``dataclasses.asdict`` followed by JSON, for a value of type ``kind``."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        kind = next((option for option in typing.get_args(kind) if _fits(option, value)), Any)
    origin, arguments = typing.get_origin(kind) or kind, typing.get_args(kind)
    if dataclasses.is_dataclass(origin) and isinstance(value, dict):
        hints = typing.get_type_hints(origin)
        return origin(**{name: restore(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    if isinstance(value, dict):
        of_key, of_item = arguments or (Any, Any)
        return {_key(of_key, key): restore(of_item, item) for key, item in value.items()}
    if isinstance(value, list) and kind is not Any:
        each = arguments[:1] * len(value) if origin is not tuple or ... in arguments else arguments
        items = [restore(kind, item) for kind, item in zip(each or [Any] * len(value), value, strict=True)]
        return items if origin is list else tuple(items)
    return Path(value) if origin is Path else value


def _fits(kind: Any, value: Any) -> bool:
    """Whether a member of a union may have become ``value``."""
    origin = typing.get_origin(kind) or kind
    if dataclasses.is_dataclass(origin):
        hints = typing.get_type_hints(origin)
        if not isinstance(value, dict) or set(value) != {one.name for one in dataclasses.fields(origin)}:
            return False
        literals = {name: hint for name, hint in hints.items() if typing.get_origin(hint) is Literal}
        return all(value[name] in typing.get_args(hint) for name, hint in literals.items())
    if origin is Path:
        return isinstance(value, str)
    if isinstance(value, list | dict):
        return isinstance(origin, type) and issubclass(origin, Mapping if isinstance(value, dict) else Sequence)
    return False  # it is what it was


def _key(kind: Any, key: str) -> Any:
    """JSON has keys of text alone."""
    return json.loads(key) if kind in (int, float, bool) else key


def seed32(seed: int) -> int:
    """A 32-bit seed that depends on all bits of ``seed``."""
    return int(np.random.SeedSequence(seed).generate_state(1)[0])


def to_box(action: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
    """An action of [-1, 1] in the simulator's own bounds."""
    return low + (np.clip(action, -1.0, 1.0) + 1.0) / 2.0 * (high - low)
