"""What a success classifier declares in recorded episodes, and the threshold at which it is right often enough."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from sims.numbers.statistics import wilson_interval
from vla_rl.rewards.classifier import SuccessClassifierConfig
from vla_rl.rewards.labels import NEVER, LabeledEpisodes

CANDIDATES = 200  # thresholds that are tried


@dataclass(frozen=True, kw_only=True)
class ScoredEpisode:
    """Of one recorded episode: the ``probability`` of each classified observation, and the control ``step`` of it.

    ``earliest``: from where on to declare success is right, beyond the end where the episode failed.
    """

    probability: Float[np.ndarray, " L"]
    step: Int[np.ndarray, " L"]
    terminated: bool
    earliest: int
    task: str

    def declared(self, threshold: float, consecutive: int) -> int:
        """The control step at which SuccessDetector declares success; NEVER where it does not."""
        streak = 0
        for i, above in enumerate((self.probability > threshold).tolist()):
            streak = streak + 1 if above else 0
            if streak >= (1 if self.terminated and i + 1 == len(self.step) else consecutive):
                return int(self.step[i])
        return NEVER

    def score(self, consecutive: int) -> float:
        """The threshold below which success is declared."""
        windows = range(consecutive, len(self.step) + 1)
        scores = [float(self.probability[i - consecutive : i].min()) for i in windows]
        if self.terminated and len(self.step):
            scores.append(float(self.probability[-1]))
        return max(scores, default=0.0)

    @property
    def succeeded(self) -> bool:
        return self.earliest < NEVER // 2


def observed_when_due(recorded: LabeledEpisodes, index: Int[np.ndarray, " N"], *, every: int) -> float:
    """Of the steps at which SuccessDetector classifies in the episodes of ``index``, without their ends, the share that
    was observed; 1 where there are none. Below 1 its observations lie elsewhere than those of ``scored_episodes``."""
    found = [
        np.isin(np.arange(every, recorded.entries[episode].steps, every), recorded.step[recorded.episode == episode])
        for episode in np.unique(recorded.episode[index])
    ]
    due = np.concatenate(found)
    return float(due.mean()) if len(due) else 1.0


def scored_episodes(
    recorded: LabeledEpisodes, index: Int[np.ndarray, " N"], probability: Float[np.ndarray, " N"], *, every: int
) -> list[ScoredEpisode]:
    """Of the episodes of ``index``: the first observation after each ``every`` control steps, and the last one."""
    episodes = []
    for episode in np.unique(recorded.episode[index]):
        here = np.flatnonzero(recorded.episode[index] == episode)
        step = recorded.step[index[here]]
        chosen, seen = [], 0
        for i in range(len(step)):
            if step[i] - seen >= every or (i + 1 == len(step) and step[i] > 0):
                chosen.append(i)
                seen = int(step[i])
        episodes.append(
            ScoredEpisode(
                probability=probability[here[chosen]],
                step=step[chosen],
                terminated=bool(recorded.terminated[episode]),
                earliest=int(recorded.earliest[episode]),
                task=recorded.entries[episode].task,
            )
        )
    return episodes


def choose_threshold(episodes: list[ScoredEpisode], config: SuccessClassifierConfig) -> tuple[float | None, float]:
    """The threshold with the best recall among those at which declared successes have ``config.precision``.

    And the best precision of all; None where no threshold has it.
    """
    scores = np.unique([0.0, *(one.score(config.consecutive) for one in episodes)])
    between = (scores[1:] + scores[:-1]) / 2
    candidates = between[np.unique(np.linspace(0, max(0, len(between) - 1), CANDIDATES).astype(int))[: len(between)]]
    best: tuple[int, float] | None = None
    highest = 0.0
    for threshold in candidates.tolist():
        at = np.array([one.declared(threshold, config.consecutive) for one in episodes])
        declared, right = at < NEVER, (at < NEVER) & (at >= np.array([one.earliest for one in episodes]))
        if not declared.any():
            continue
        precision = right.sum() / declared.sum()
        highest = max(highest, float(precision))
        if precision >= config.precision and (best is None or right.sum() >= best[0]):
            best = int(right.sum()), threshold
    return (None if best is None else best[1]), highest


def episode_rates(
    declared: Bool[np.ndarray, " E"], right: Bool[np.ndarray, " E"], succeeded: Bool[np.ndarray, " E"]
) -> dict[str, Any]:
    """{episodes, successes, declared, precision, recall, false_positive_rate}, the rates with Wilson intervals.

    ``right``: declared in an episode that succeeds, and not too early. ``false_positive_rate``: share of the episodes
    that did not succeed in which success was declared.
    """
    return {
        "episodes": len(declared),
        "successes": int(succeeded.sum()),
        "declared": int(declared.sum()),
        "precision": rate(int(right.sum()), int(declared.sum())),
        "recall": rate(int(right.sum()), int(succeeded.sum())),
        "false_positive_rate": rate(int((declared & ~succeeded).sum()), int((~succeeded).sum())),
    }


def rate(count: int, total: int) -> dict[str, Any]:
    """{value, interval, count, total}; the value is None without trials."""
    value = count / total if total else None
    return {"value": value, "interval": list(wilson_interval(count, total)), "count": count, "total": total}
