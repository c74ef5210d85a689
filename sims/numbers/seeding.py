"""Seeds of random streams: one per purpose, none of which overlap."""

from __future__ import annotations

import zlib

import numpy as np


def spawn_seed(seed: int, *purpose: str | int) -> int:
    """The seed of the stream that ``seed`` has for one purpose, for example ``spawn_seed(0, "exploration")``.

    Purposes are keys of a ``numpy.random.SeedSequence``: another seed, purpose or number gives an unrelated stream,
    where ``seed + 1`` would be the stream of the next run.
    """
    key = [zlib.crc32(part.encode()) if isinstance(part, str) else part for part in purpose]
    words = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return int(words[0] >> np.uint64(1))  # below 2**63, for libraries that read signed integers
