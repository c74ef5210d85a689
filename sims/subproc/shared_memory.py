"""The memory that a trainer and its worker processes share: arrays with one index per environment."""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Iterator

import numpy as np

from sims.subproc.single_env import SingleSpec

ALIGNMENT = 64
SLOTS = 3  # image buffers: a caller may keep two of them while the next observation is written


class SharedMemory:
    """numpy views of an anonymous file. Any process with ``fd`` can map it; it is freed with its last user.

    actions: every action of the running episode.  elapsed: control steps executed since the reset; a worker increments
    it after every step, which tells the trainer that it is alive.
    """

    actions: np.ndarray  # float32 [N, max_steps, A]
    start: np.ndarray  # int64 [N, 3]: task, seed, number of actions to replay
    suggestion: np.ndarray  # float32 [N, A], the expert's action
    reward: np.ndarray  # float32 [N]
    elapsed: np.ndarray  # int64 [N]
    flags: np.ndarray  # bool [3, N]: terminated, truncated, success
    state: np.ndarray  # float32 [N, S]
    images: np.ndarray  # uint8 [SLOTS, N, cameras, height, width, 3]

    def __init__(self, spec: SingleSpec, num_envs: int, fd: int) -> None:
        self.spec, self.fd = spec, fd
        fields = list(_layout(spec, num_envs))
        size = sum(_padded(dtype, shape) for _, dtype, shape in fields)
        if os.fstat(fd).st_size == 0:
            os.ftruncate(fd, size)
        self._map = mmap.mmap(fd, size)
        offset = 0
        for name, dtype, shape in fields:
            setattr(self, name, np.ndarray(shape, dtype, self._map, offset))
            offset += _padded(dtype, shape)

    @classmethod
    def create(cls, spec: SingleSpec, num_envs: int) -> SharedMemory:
        return cls(spec, num_envs, anonymous_file("environments"))

    def close(self) -> None:
        if self.fd >= 0:  # closing again would close another's file, which has its number now
            os.close(self.fd)
            self.fd = -1


def anonymous_file(name: str) -> int:
    """A descriptor of an empty file in memory, which the (often small) size of /dev/shm does not limit."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _layout(spec: SingleSpec, num_envs: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    yield "actions", "f4", (num_envs, spec.max_steps, spec.action_dim)
    yield "start", "i8", (num_envs, 3)
    yield "suggestion", "f4", (num_envs, spec.action_dim)
    yield "reward", "f4", (num_envs,)
    yield "elapsed", "i8", (num_envs,)
    yield "flags", "?", (3, num_envs)
    yield "state", "f4", (num_envs, spec.state_dim)
    yield "images", "u1", (SLOTS, num_envs, len(spec.cameras), *spec.image_size, 3)


def _padded(dtype: str, shape: tuple[int, ...]) -> int:
    size = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    return max(1, -(-size // ALIGNMENT)) * ALIGNMENT
