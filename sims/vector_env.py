"""The interface of environments: simulated, imagined and real robots.

Two rules make chunked policies fast and correct:

* **Observing is separate from stepping.** ``step`` never renders; ``observe`` does, and only when it is called.
* **No auto-reset.** A finished environment does not change until it is reset, so ``observe`` after a chunk returns the
  true successor even where the episode ended in the middle of the chunk. Before its first ``reset`` an environment
  counts as finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from sims.errors import UserError
from sims.tensor_dataclass import TensorDataclass, pad_to_longest

MIN_INSTRUCTION_BYTES = 96
INSTRUCTION_BYTES_STEP = 32


class CannotCapture(UserError):
    """``VectorEnv.capture`` was called on an environment whose ``spec.can_capture`` is False."""


def encode_instructions(instructions: Sequence[str]) -> UInt8[Tensor, "N instruction_bytes"]:
    """UTF-8 bytes of any length, zero padded to a common multiple of 32 bytes, at least 96."""
    encoded = [instruction.encode() for instruction in instructions]
    longest = max([MIN_INSTRUCTION_BYTES, *map(len, encoded)])
    width = -(-longest // INSTRUCTION_BYTES_STEP) * INSTRUCTION_BYTES_STEP
    out = np.zeros((len(encoded), width), dtype=np.uint8)
    for row, data in zip(out, encoded, strict=True):
        row[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    return torch.from_numpy(out)


def decode_instructions(instructions: UInt8[Tensor, "N instruction_bytes"]) -> list[str]:
    """Inverse of ``encode_instructions``."""
    return [bytes(row).rstrip(b"\0").decode() for row in instructions.cpu().numpy()]


def update_instructions(
    buffer: UInt8[Tensor, "N bytes_before"],
    env_ids: Sequence[int],
    instructions: UInt8[Tensor, "n bytes_new"],
) -> UInt8[Tensor, "N bytes_after"]:
    """A copy of ``buffer`` with ``buffer[env_ids] = instructions``, as wide as the wider of the two."""
    buffer, instructions = pad_to_longest([buffer, instructions.to(buffer.device)])
    updated = buffer.clone()
    updated[list(env_ids)] = instructions
    return updated


@dataclass(frozen=True, kw_only=True)
class Observation(TensorDataclass):
    """What a policy sees.

    images: RGB, first image row at the top. instruction: zero-padded UTF-8 bytes; observations whose instructions have
    different widths can be stacked and concatenated.
    """

    ragged: ClassVar[tuple[str, ...]] = ("instruction",)

    images: UInt8[Tensor, "*N cameras height width 3"]
    state: Float[Tensor, "*N state_dim"]
    instruction: UInt8[Tensor, "*N instruction_bytes"]


@dataclass(frozen=True, kw_only=True)
class Step(TensorDataclass):
    """Result of one control step. ``terminated``: the task ended in success or failure; ``truncated``: the time limit.

    ``valid`` is False where the environment failed (its simulator crashed or hung): it is then truncated, its other
    values are undefined, and it does not change until it is reset. Environments that cannot fail omit it: all valid.
    ``true_success``: the environment's own success, where a learned reward decides ``success``; None elsewhere.
    """

    reward: Float[Tensor, "*N"]
    terminated: Bool[Tensor, "*N"]
    truncated: Bool[Tensor, "*N"]
    success: Bool[Tensor, "*N"]
    intervened: Bool[Tensor, "*N"]
    valid: Bool[Tensor, "*N"] = None  # type: ignore[assignment]  # __post_init__ fills it
    true_success: Bool[Tensor, "*N"] | None = None

    def __post_init__(self) -> None:
        if self.valid is None:
            object.__setattr__(self, "valid", torch.ones_like(self.terminated))

    @property
    def done(self) -> Bool[Tensor, "*N"]:
        return self.terminated | self.truncated


@dataclass(frozen=True, kw_only=True)
class StartState:
    """Where an episode starts. ``task`` and ``seed`` alone determine the initial state and all randomness.

    ``task`` is an index into ``EnvSpec.tasks``; 0 <= seed < 2**63. ``snapshot`` is the environment's own full state
    (including elapsed steps and flags) taken by ``capture``; with it the episode continues from there instead.
    """

    task: int
    seed: int
    snapshot: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"a start's seed must be in 0 .. 2^63 - 1, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Sizes, rates and names of a VectorEnv.

    image_size: (height, width) in pixels. max_steps: the longest episode, in control steps. tasks: names that
    ``StartState.task`` indexes. fingerprint: versions that a result depends on. can_capture: whether ``capture`` works.
    action_delay: control steps from ``step`` to the execution of its action. task_limits: the longest episode of each
    task, in control steps; None: ``max_steps`` for all.

    Raises ValueError where ``task_limits`` are not as many as tasks, or their largest is not ``max_steps``.
    """

    name: str
    num_envs: int
    action_dim: int
    state_dim: int
    cameras: tuple[str, ...]
    image_size: tuple[int, int]
    control_hz: float
    max_steps: int
    tasks: tuple[str, ...]
    device: torch.device
    fingerprint: Mapping[str, str]
    can_capture: bool = True
    action_delay: int = 0
    task_limits: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        limits = self.task_limits
        if limits is not None and (len(limits) != len(self.tasks) or max(limits) != self.max_steps):
            raise ValueError(
                f"task_limits must be one for each of {len(self.tasks)} tasks and at most max_steps, the longest "
                f"episode ({self.max_steps}), got {limits}"
            )

    @property
    def limits(self) -> dict[str, int]:
        """The longest episode of every task, in control steps."""
        return dict(zip(self.tasks, self.task_limits or [self.max_steps] * len(self.tasks), strict=True))

    def ids(self, env_ids: Sequence[int] | None) -> list[int]:
        """``env_ids``; all in order where they are None."""
        return list(range(self.num_envs)) if env_ids is None else [int(env_id) for env_id in env_ids]


@runtime_checkable
class VectorEnv(Protocol):
    """N independent episodes that are stepped together. Tensors are on ``spec.device``."""

    spec: EnvSpec

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """Start environment ``env_ids[i]`` (default: all in order) at ``start[i]``, which determines all randomness.

        Give one start per environment, with tasks of ``spec.tasks``: some environments raise ValueError, others do
        not check.
        """
        ...

    def step(self, action: Float[Tensor, "N A"]) -> Step:
        """One control step of every environment; action: float32 in [-1, 1]. The result's tensors are [N].

        What an action outside the range or a NaN does is up to the environment; no caller may rely on it.
        A finished environment does not change: reward 0, its flags stay.
        """
        ...

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """Present, of the n ``env_ids`` (default: all): shapes [n, ...]. Images are rendered here only.

        A copy, which later steps leave as it is: rollouts keep what they saw.
        """
        ...

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """The present states of ``env_ids`` (default: all); ``reset(start=...)`` restores them, in any process.

        Optional: raises CannotCapture where ``spec.can_capture`` is False. Such environments restart their episodes
        when a run is resumed.
        """
        ...

    def close(self) -> None:
        """Closing again does nothing."""
        ...


@runtime_checkable
class Expert(Protocol):
    """A demonstrator that reads the simulator's own state."""

    def act(self) -> Float[Tensor, "N A"]:
        """The next action of every environment, in [-1, 1]."""
        ...


@runtime_checkable
class ProjectingEnv(Protocol):
    """An environment that knows where its end effector is, and where points are in its cameras' images."""

    def end_effector(self, env_id: int) -> Float[np.ndarray, " 3"]:
        """Present position [m]."""
        ...

    def planned_path(self, env_id: int, actions: Float[np.ndarray, "n A"]) -> Float[np.ndarray, "n_plus_1 3"]:
        """The present position, then where each of these actions is to bring the end effector [m]."""
        ...

    def project(self, env_id: int, points: Float[np.ndarray, "n 3"]) -> Float[np.ndarray, "cameras n 2"]:
        """(right, down) as shares of each image's width and height, seen now; NaN behind the camera."""
        ...


@runtime_checkable
class DemonstratedEnv(Protocol):
    """An environment with a scripted expert."""

    def expert(self, *, noise: float, seed: int) -> Expert:
        """``noise`` 0 is the best it can do, larger is worse; each environment documents in which way."""
        ...
