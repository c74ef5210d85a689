"""Preferences by what is known of recorded episodes: success over failure, later over earlier on the way to success."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

from policies.device import Device
from sims.numbers.ranges import Share
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.preferences.pairs import NO_PREFERENCE
from vla_rl.rewards.progress.model import ProgressConfig, progress_targets


@dataclass(frozen=True, kw_only=True)
class TruthLabelsConfig:
    """What is known of the recorded episodes. ``margin``: share of the time to success by which two observations differ
    of which the later one is preferred.
    """

    name: Literal["truth"] = "truth"
    margin: Share = 0.1


class TruthLabels:
    """Of two observations of successes the one is preferred at which more of the time to success has passed, by more
    than ``margin`` of it; one that shows success is preferred to any of a failed episode. All others: no preference.
    """

    def __init__(self, recorded: LabeledEpisodes, config: TruthLabelsConfig, device: Device) -> None:
        self._success, self._margin = recorded.success, config.margin
        self._share = progress_targets(recorded, ProgressConfig())  # of the time; NaN in failures

    def __call__(self, first: Int[np.ndarray, " N"], second: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
        before, after = self._share[first], self._share[second]
        gap = after - before
        gap = np.where(self._success[first] & np.isnan(after), -np.inf, gap)
        gap = np.where(self._success[second] & np.isnan(before), np.inf, gap)
        return np.where(gap > self._margin, 1, np.where(gap < -self._margin, 0, NO_PREFERENCE))
