"""Where imagined episodes begin: recorded moments, chosen by a StartState's task and seed alone.

A share starts where episodes start; the rest at keyframes a little before an episode was decided, won or lost, where
practice matters and imagination has not had time to drift (WoVR's keyframe-initialised rollouts).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sims.vector_env import StartState
from world_models.clips import Clip, ClipSampler
from world_models.dynamics import WorldModelError


@dataclass(frozen=True, kw_only=True)
class KeyframeConfig:
    """``beginnings``: share of imagined episodes that start at an episode's first look. ``before_end``: the others
    start so many control steps before a recorded end. ``failures``: share of keyframes from episodes that failed.
    """

    beginnings: float = 0.5
    before_end: tuple[int, int] = (8, 32)
    failures: float = 0.7

    def __post_init__(self) -> None:
        if not 0 <= self.beginnings <= 1 or not 0 <= self.failures <= 1:
            raise ValueError("keyframes.beginnings and keyframes.failures must be within [0, 1]")
        if not 1 <= self.before_end[0] <= self.before_end[1]:
            raise ValueError(f"keyframes.before_end must be two increasing numbers of steps, got {self.before_end}")


class Keyframes:
    """Moments of recorded episodes per task. WorldModelError if a task has none."""

    def __init__(self, clips: ClipSampler, config: KeyframeConfig, *, tasks: tuple[str, ...]) -> None:
        self.clips, self.config, self.tasks = clips, config, tasks
        self._beginnings: list[np.ndarray] = []
        self._near: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []  # won, lost: (episode, look)
        for task in tasks:
            episodes = np.array([i for i, entry in enumerate(clips.entries) if entry.task == task], dtype=np.int64)
            if not len(episodes):
                known = sorted({entry.task for entry in clips.entries})
                raise WorldModelError(f"no recorded episode of task {task!r} to start from; recorded are {known}")
            self._beginnings.append(episodes)
            won = [pair for e in episodes if clips.entries[e].success for pair in self._looks_near_end(int(e))]
            lost = [pair for e in episodes if not clips.entries[e].success for pair in self._looks_near_end(int(e))]
            self._near.append((won, lost))

    def _looks_near_end(self, episode: int) -> list[tuple[int, int]]:
        steps = self.clips.look_steps(episode)
        left = self.clips.entries[episode].steps - steps
        low, high = self.config.before_end
        return [(episode, int(look)) for look in np.flatnonzero((left >= low) & (left <= high) & (steps > 0))]

    def choose(self, start: StartState) -> tuple[int, int]:
        """(episode, look) that ``start`` stands for."""
        if not 0 <= start.task < len(self.tasks):
            raise ValueError(f"reset: task {start.task} is not in 0..{len(self.tasks) - 1} ({self.tasks})")
        rng = np.random.default_rng([start.seed, start.task])
        won, lost = self._near[start.task]
        near = lost if (rng.random() < self.config.failures and lost) or not won else won
        if rng.random() >= self.config.beginnings and near:
            return near[rng.integers(len(near))]
        episodes = self._beginnings[start.task]
        return int(episodes[rng.integers(len(episodes))]), 0

    def moment(self, start: StartState) -> tuple[Clip, int]:
        """The recorded moment (a clip without predictions, one row) and the control steps that led to it."""
        episode, look = self.choose(start)
        return self.clips.clip(episode, look, 0), int(self.clips.look_steps(episode)[look])
