"""The file of a sweep: which settings are searched, and how."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from sims.numbers.ranges import Count, Distinct, PositiveFloat, PositiveInt, Seed

Scalar = bool | int | float | str | None
Choices = Annotated[tuple[Scalar, ...], Distinct(least=1)]


@dataclass(frozen=True, kw_only=True)
class Range:
    """All numbers from ``low`` to ``high``, both included; ``log``: drawn evenly in their logarithm."""

    low: int | float
    high: int | float
    log: bool = False


@dataclass(frozen=True, kw_only=True)
class Pruning:
    """A trial ends early where its best validation so far is below the median of the complete trials at that moment.

    ``startup_trials``: complete trials before any is ended. ``warmup``: validations of a trial before it may be ended.
    """

    startup_trials: Count = 5
    warmup: Count = 1


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """``settings``: of the experiment, each with a list of values or a range. ``trials``: settings that are tried;
    where all are lists, each combination once at most.
    ``seeds``: of the runs of each trial, whose mean is the trial's objective. ``objective``: the metric to maximize:
    validation, validation_low or validation/TASK, which come from the validation starts; held-out starts are not for
    tuning. ``final_validations``: of a run, the last so many, whose mean is its objective. ``budget_hours``: no trial
    begins once the runs took longer. ``pruning``: null, every trial is completed. ``sampler_seed``: determines the
    settings that are tried, together with the results so far.
    """

    settings: Mapping[str, Range | Choices]
    trials: PositiveInt = 20
    seeds: Annotated[tuple[Seed, ...], Distinct(least=1)] = (0,)
    objective: str = "validation"
    final_validations: PositiveInt = 1
    budget_hours: PositiveFloat | None = None
    pruning: Pruning | None = None
    sampler_seed: Seed = 0

    def __post_init__(self) -> None:
        if not self.settings:
            raise ValueError("settings names no setting of the experiment to search")
        for name, values in self.settings.items():
            if name == "seed" or name.partition(".")[0] == "evaluation":
                raise ValueError(f"settings: {name} must be the same in all trials, or they cannot be compared")
            if isinstance(values, Range):
                _check_range(name, values)


def _check_range(name: str, values: Range) -> None:
    if values.low >= values.high:
        raise ValueError(f"settings: {name}: low ({values.low}) must be below high ({values.high})")
    if values.log and values.low <= 0:
        raise ValueError(f"settings: {name}: low must be above 0 where log is true, got {values.low}")
