"""What runners ask of every algorithm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

from policies.policy import Policy
from sims.numbers.ranges import Count, Interval, PartialShare
from vla_rl.rollouts.collector import Collector

Metrics = dict[str, float]


@runtime_checkable
class Algorithm(Protocol):
    """Improves ``policy`` in the environment of ``collector``; ``state_dict`` / ``load_state_dict`` are exact."""

    policy: Policy
    collector: Collector
    iteration: int

    def iterate(self) -> Metrics:
        """Collect, learn, count one iteration. The metrics have at least ``success`` and ``control_steps``."""
        ...

    def deployed(self) -> Policy:
        """The policy that is evaluated and shipped: the averaged weights where an average is kept."""
        ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """``failure_weight`` in [0, 1): how much more often tasks that still fail are trained (rollouts/starts.py)."""

    iterations: Count = 60
    gamma: Annotated[float, Interval(gt=0, le=1)] = 0.99
    failure_weight: PartialShare = 0.0

    def with_demonstrations(self, stores: Sequence[Path]) -> AlgorithmConfig:
        """As this run uses it: ``stores`` are the episodes that it started from, if any."""
        return self

    def check_num_envs(self, num_envs: int, setting: str) -> None:
        """ValueError, naming ``setting``, if the algorithm cannot use so many environments."""
