"""What runners ask of every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from policies.policy import Policy
from sims.numbers.ranges import Count, Interval, PartialShare, PositiveInt
from vla_rl.rollouts.sharded import Rollouts

Metrics = dict[str, float]


@runtime_checkable
class Algorithm(Protocol):
    """Improves ``policy`` in the environment of ``collector``."""

    policy: Policy
    iteration: int

    @property
    def collector(self) -> Rollouts:
        """What acts. Its state is the runner's to save."""
        ...

    def iterate(self) -> Metrics:
        """Collect, learn, count one iteration. The metrics have ``control_steps``, and ``success`` where it acted.

        UserError where nothing can be learned, NotFinite where a number of the rollout or the update is not finite.
        """
        ...

    def deployed(self) -> Policy:
        """The policy that is evaluated and shipped: the averaged weights where an average is kept."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """All that later iterations depend on, except the collector's state."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there to the bit; the collector is restored before. UserError where recorded data are others."""
        ...


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """``failure_weight`` in [0, 1): how much more often tasks that still fail are trained (rollouts/starts.py).

    ``rollout_shards``: equal parts of the environments, each with its own random streams and batches, which a cluster
    collects in as many processes at most (docs/scaling.md); results depend on it, and not on the processes.
    ``staleness``: rollouts (of algorithm off_policy: chunks) that are asked for before the one that is learned from is
    taken, so that collectors of a cluster act while the learner learns, with weights that are as many publications
    older. 0: rollouts wait for the update. Results depend on it, and not on whether there is a cluster.
    """

    iterations: Count = 60
    gamma: Annotated[float, Interval(gt=0, le=1)] = 0.99
    failure_weight: PartialShare = 0.0
    rollout_shards: PositiveInt = 1
    staleness: Count = 0

    def with_demonstrations(self, stores: Sequence[Path], *, folds: tuple[int, ...] | None = None) -> AlgorithmConfig:
        """As this run uses it: ``stores`` are the episodes that it started from, if any.

        ``folds``: of the starts of recorded episodes that it may learn from (``Selection.folds``).
        """
        return self

    def acting(self) -> AlgorithmConfig:
        """For a process that only acts, without the memory that learning takes."""
        return self

    def check_num_envs(self, num_envs: int, setting: str) -> None:
        """ValueError, naming ``setting``, if the algorithm cannot use so many environments."""
        if num_envs % self.rollout_shards:
            raise ValueError(
                f"{setting} ({num_envs}) must be a multiple of algorithm.rollout_shards ({self.rollout_shards})"
            )
