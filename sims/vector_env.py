"""The seam between worlds and everything that acts in them.

Two rules make chunked policies fast and right:

* **Looking is apart from stepping.** ``step`` never renders; ``observe`` does, and only when it is called.
* **No auto-reset, and a finished row stands still** until it is reset. What ``observe`` shows after a chunk is
  therefore the true successor of every row, so an end in mid-chunk needs no special case. Before its first
  ``reset`` a row counts as finished.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from torch import Tensor

from sims.tensor_dataclass import TensorDataclass

TEXT_BYTES = 96


def encode_instructions(texts: Sequence[str], length: int = TEXT_BYTES) -> UInt8[Tensor, "N length"]:
    """UTF-8 bytes, zero padded; ValueError if an instruction is longer than ``length`` bytes."""
    out = np.zeros((len(texts), length), dtype=np.uint8)
    for row, text in zip(out, texts, strict=True):
        data = text.encode()
        if len(data) > length:
            raise ValueError(f"instruction of {len(data)} bytes, at most {length} are allowed: {text!r}")
        row[: len(data)] = np.frombuffer(data, dtype=np.uint8)
    return torch.from_numpy(out)


def decode_instructions(text: UInt8[Tensor, "N length"]) -> list[str]:
    """Inverse of ``encode_instructions``."""
    return [bytes(row).rstrip(b"\0").decode() for row in text.cpu().numpy()]


@dataclass(frozen=True, kw_only=True)
class Observation(TensorDataclass):
    """What a policy sees. Images are RGB, row 0 at the top; text is the instruction as zero-padded UTF-8 bytes."""

    images: UInt8[Tensor, "*N cameras height width 3"]
    state: Float[Tensor, "*N state_dim"]
    text: UInt8[Tensor, "*N text_bytes"]


@dataclass(frozen=True, kw_only=True)
class Step(TensorDataclass):
    """Outcome of one control step. ``terminated``: the task ended, well or badly; ``truncated``: time ran out.

    ``valid`` is False where a row's world failed (its simulator crashed or hung): the row comes back truncated, its
    numbers mean nothing and it stands still until it is reset. A world that cannot fail leaves it out: all valid.
    """

    reward: Float[Tensor, "*N"]
    terminated: Bool[Tensor, "*N"]
    truncated: Bool[Tensor, "*N"]
    success: Bool[Tensor, "*N"]
    intervened: Bool[Tensor, "*N"]
    valid: Bool[Tensor, "*N"] = None  # type: ignore[assignment]  # __post_init__ fills it

    def __post_init__(self) -> None:
        if self.valid is None:
            object.__setattr__(self, "valid", torch.ones_like(self.terminated))


@dataclass(frozen=True, kw_only=True)
class StartState:
    """Where an episode starts. ``task`` and ``seed`` alone give the beginning: everything random derives from them.

    ``snapshot`` is the simulator's own full state (elapsed steps and latches included) taken by ``capture``;
    with it the episode goes on from there instead.
    """

    task: int
    seed: int  # of 63 bits
    snapshot: np.ndarray | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 1 << 63:
            raise ValueError(f"a start's seed must be in 0 .. 2^63 - 1, got {self.seed}")


@dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """``tasks``: names that StartState.task indexes. ``fingerprint``: versions that a result depends on."""

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


class VectorEnv(Protocol):
    """N independent episodes stepped together: simulated, imagined or physical. Tensors live on ``spec.device``."""

    spec: EnvSpec

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        """Start row ``env_ids[i]`` (default: every row in order) at ``start[i]``. The caller owns all randomness."""
        ...

    def step(self, action: Float[Tensor, "N A"]) -> Step:
        """One control step of every row, actions in [-1, 1]. A finished row stands still, reward 0, flags kept."""
        ...

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        """What the policy would see now in these rows (default: all); images are made here, and only here."""
        ...

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        """These rows as they are now; ``reset(start=...)`` brings them back exactly, in this or another process."""
        ...

    def close(self) -> None: ...


class Expert(Protocol):
    """A demonstrator that looks at the simulator's own state."""

    def act(self) -> Float[Tensor, "N A"]:
        """The next action of every row."""
        ...


@runtime_checkable
class DemonstratedEnv(Protocol):
    """A world that comes with a scripted demonstrator."""

    def expert(self, *, noise: float, seed: int) -> Expert:
        """``noise`` = 0 is the best it can do, larger is worse; each world says in what way."""
        ...
