"""Keeps an update of the policy only where it is better beyond chance.

A rule of RL-100 (Lei et al. 2025), which accepts any gain and estimates it in a learned model; here the gain must reach
``margin`` standard errors, and it is measured in episodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Bool
from torch import Tensor

from sims.numbers.ranges import NonNegativeFloat, PositiveInt


@dataclass(frozen=True, kw_only=True)
class GateConfig:
    """``episodes``: from the same starts before and after. ``margin``: of the gain, in its standard errors."""

    episodes: PositiveInt = 100
    margin: NonNegativeFloat = 2.0


def paired_gain(before: Bool[Tensor, " n"], after: Bool[Tensor, " n"]) -> tuple[float, float]:
    """The gain in success from the same starts, and its standard error: that of the mean of n paired differences."""
    difference = after.double() - before.double()
    return difference.mean().item(), (difference.std() / len(difference) ** 0.5).item() if len(difference) > 1 else 0.0


class Gate:
    """Holds the accepted weights and the outcomes of their episodes."""

    def __init__(self, config: GateConfig) -> None:
        self.config = config
        self._outcomes: Tensor | None = None
        self._weights: dict[str, Tensor] = {}

    @property
    def is_open(self) -> bool:
        """Whether nothing was accepted yet: the first weights are those to beat."""
        return self._outcomes is None

    def accept(
        self, outcomes: Bool[Tensor, " n"], weights: Mapping[str, Tensor]
    ) -> tuple[Mapping[str, Tensor], dict[str, float]]:
        """The weights to go on with, ``weights`` or those accepted before, and what was found."""
        if self._outcomes is None:
            gain, error, accepted = 0.0, 0.0, True
        else:
            gain, error = paired_gain(self._outcomes, outcomes)
            accepted = gain > 0 and gain >= self.config.margin * error
        if accepted:
            self._outcomes, self._weights = outcomes, {name: value.detach().clone() for name, value in weights.items()}
        return self._weights, {"gate_gain": gain, "gate_error": error, "gate_accepted": float(accepted)}

    def state_dict(self) -> dict[str, Any]:
        return {"outcomes": self._outcomes, "weights": dict(self._weights)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._outcomes, self._weights = state["outcomes"], dict(state["weights"])
