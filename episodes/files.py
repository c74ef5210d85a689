"""What is written is on the disk when this returns; a lock for several processes."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def ends_within_line(file: IO[Any]) -> bool:
    """Whether the last writer was killed within a line. ``file`` is open for reading too."""
    size = os.fstat(file.fileno()).st_size
    return size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"


def write_atomically(path: Path, data: bytes) -> None:
    """Whatever happens, ``path`` holds its old content or all of ``data``, on the disk."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    with partial.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    sync(path.parent)


def write_json(path: Path, value: Any) -> None:
    """As ``write_atomically``."""
    write_atomically(path, json.dumps(value, indent=1).encode())


@contextlib.contextmanager
def locked(path: Path, *, waiting: str = "") -> Iterator[None]:
    """One process at a time, by a lock on the file ``path``, which stays; without one where it cannot be written.

    ``waiting``: said on standard error where another process has it.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            lock = stack.enter_context(open(path, "wb"))
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if waiting:
                    print(waiting, file=sys.stderr, flush=True)
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield
