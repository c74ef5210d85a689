"""Where rollouts and replays keep the keys and values of frozen prefixes, which decide whether they fit into memory.

pi0 has 10.3 MB of them per observation with two cameras in bfloat16, so a rollout of 24,576 chunks has 254 GB, of which
a device holds none; its images are 7.4 GB.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sims.numbers.ranges import NonNegativeFloat

Place = Literal["device", "host", "recompute"]
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """``where`` auto: on the device while all records of a rollout fit ``device_gb``, else in the host's memory while
    they fit ``host_gb``, else the observation is kept and encoded again in every epoch. A replay is always in the
    host's memory, whatever the device has: of its records ``host_gb`` alone counts, and device means host.
    Each record counts once; there are two of each while a rollout is made into a batch, and one while it is learned
    from."""

    where: Literal["auto", "device", "host", "recompute"] = "auto"
    device_gb: NonNegativeFloat = 8.0
    host_gb: NonNegativeFloat = 32.0

    def place(self, record_bytes: int, records: int, *, in_host: bool = False) -> Place:
        """For this many records of this size. ``in_host``: of a replay."""
        if self.where != "auto":
            return self.where
        needed = record_bytes * records / GB
        if needed <= self.device_gb and not in_host:
            return "device"
        return "host" if needed <= self.host_gb else "recompute"
