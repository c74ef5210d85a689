"""The section ``cluster``: rollouts and updates in other processes, on this machine or on others (docs/scaling.md)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sims.numbers.ranges import Count, NonNegativeFloat, PositiveFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Where the shards of a rollout are collected and the gradients of an update computed; results do not depend on it.

    ``address``: of a Ray cluster, HOST:PORT, or auto: RAY_ADDRESS, else the one that was started by hand on this
    machine (ray start), else one of the run's own, guarded by a token of its own; local: always that. ``collectors``:
    processes; null: one per ``algorithm.rollout_shards``; 0: none, the run's own process collects, without Ray.
    ``learners``: processes of this machine that share the
    micro-batches of an update, the run's own among them; on GPUs one for each. ``sharding``: none, each learner has all
    weights and optimizer states; fsdp, each has its part of them, with the same results, bit for bit.
    ``cpus``: reserved for each collector.
    ``gpus``: reserved for each collector. ``device``: of a collector; null: as the run's. ``threads``: of a collector's
    networks; null: as many as the learner's, for the last bits of results may
    depend on it. ``placement``: of collectors, pack fills one machine after the other, spread takes them in turn; with
    ``collectors`` 0 pipelined has the run's own process collect its shards in threads, one of which steps its
    environments while the policy chooses for another's. ``hang_s``: seconds
    without a finished rollout after which a collector is replaced, and without an answer of a learner, or progress in
    sending to it, after which the run ends. ``start_timeout_s``: seconds for the start of a
    collector. ``restarts``: collectors that a run replaces before it gives up.
    """

    address: str = "auto"
    collectors: Count | None = None
    learners: PositiveInt = 1
    sharding: Literal["none", "fsdp"] = "none"
    cpus: NonNegativeFloat = 1.0
    gpus: NonNegativeFloat = 0.0
    device: str | None = None
    threads: PositiveInt | None = None
    placement: Literal["pack", "spread", "pipelined"] = "pack"
    hang_s: PositiveFloat = 600.0
    start_timeout_s: PositiveFloat = 300.0
    restarts: Count = 20

    def __post_init__(self) -> None:
        if self.placement == "pipelined" and self.collects:
            raise ValueError("cluster.placement pipelined is of the run's own process: it needs cluster.collectors 0")
        if self.sharding != "none" and self.learners == 1:
            raise ValueError(
                f"cluster.sharding {self.sharding} divides weights between learners: set cluster.learners to at least 2"
            )

    @property
    def collects(self) -> bool:
        """Whether rollouts are collected on a Ray cluster."""
        return self.collectors != 0
