"""Keeps an update of the policy only where it is better beyond chance.

A rule of RL-100 (Lei et al. 2025), which accepts any gain and estimates it in a learned model; here the gain must reach
``margin`` standard errors, and it is measured in episodes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from jaxtyping import Bool
from torch import Tensor

from sims.numbers.ranges import LARGEST, Interval, NonNegativeFloat


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """``episodes``: from the same starts before and after. ``margin``: of the gain, in its standard errors."""

    episodes: Annotated[int, Interval(ge=2, le=LARGEST)] = 100
    margin: NonNegativeFloat = 2.0


def paired_gain(before: Bool[Tensor, " n"], after: Bool[Tensor, " n"]) -> tuple[float, float]:
    """The gain in success from the same starts, and its standard error: that of the mean of n paired differences."""
    difference = after.double() - before.double()
    return difference.mean().item(), (difference.std() / len(difference) ** 0.5).item() if len(difference) > 1 else 0.0


class Gate:
    """Holds the accepted state of a learner and the outcomes of its policy's episodes."""

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        self._outcomes: Tensor | None = None
        self._state: dict[str, Any] = {}

    @property
    def is_open(self) -> bool:
        """Whether nothing was accepted yet: the first policy is the one to beat."""
        return self._outcomes is None

    def accept(self, outcomes: Bool[Tensor, " n"], state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, float]]:
        """The state to go on with, ``state`` or the one accepted before, and what was found.

        ``success`` is that of the policy that is kept, ``gate_success`` that of these ``outcomes``.
        """
        best = outcomes if self._outcomes is None else self._outcomes
        gain, error = paired_gain(best, outcomes)
        accepted = self.is_open or (gain > 0 and gain >= self.config.margin * error)
        if accepted:
            best, self._state = outcomes, copy.deepcopy(dict(state))
        self._outcomes = best
        found = {"gate_gain": gain, "gate_error": error, "gate_accepted": float(accepted)}
        found |= {"success": best.float().mean().item(), "gate_success": outcomes.float().mean().item()}
        return copy.deepcopy(self._state), found  # an optimizer that loads its state goes on in the same tensors

    def state_dict(self) -> dict[str, Any]:
        return {"outcomes": self._outcomes, "state": dict(self._state)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._outcomes, self._state = state["outcomes"], dict(state["state"])
