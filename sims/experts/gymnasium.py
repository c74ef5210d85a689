"""Scripted experts of single Gymnasium environments: registered classes, or a function that the settings name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import numpy as np

from sims.experts.pusht import PushTExpert, check_pusht_arguments


@runtime_checkable
class GymnasiumExpert(Protocol):
    """A demonstrator that reads the state of one environment."""

    def reset(self) -> None:
        """An episode begins."""
        ...

    def act(self) -> np.ndarray:
        """The next action, in the units of the environment's own action space; the environment is not changed."""
        ...


# Registered id -> a check of the arguments of ``gymnasium.make``, which raises UserError.
CHECKS: Mapping[str, Callable[[Mapping[str, Any]], None]] = {"gym_pusht/PushT-v0": check_pusht_arguments}
# Registered id -> a function of the unwrapped environment.
EXPERTS: Mapping[str, Callable[[Any], GymnasiumExpert]] = {"gym_pusht/PushT-v0": PushTExpert}

ExpertFunction = Callable[[Any, Any], np.ndarray]
"""(unwrapped environment, its latest observation) -> the next action, in the units of its own action space"""
