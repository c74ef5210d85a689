"""Where imagined episodes begin: recorded moments, chosen by a StartState's task and seed alone.

A share starts where episodes start; the rest at keyframes a little before an episode was decided, won or lost, where
practice matters and imagination has not had time to drift (WoVR's keyframe-initialized rollouts).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from sims.vector_env import StartState
from world_models.data.clips import Clip, ClipSampler
from world_models.world_model import WorldModelError


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


class Starts(Protocol):
    """How an imagined world finds the recorded moment that a StartState stands for."""

    @property
    def tasks(self) -> tuple[str, ...]: ...

    def moment(self, start: StartState) -> tuple[Clip, int]:
        """The recorded moment (one row, no predictions) and the control steps that led to it."""
        ...


class Beginnings:
    """The recorded episodes' own beginnings: a StartState stands for the episode that was recorded from it, so the
    same StartState can begin an episode in imagination and in the world that recorded it."""

    def __init__(self, clips: ClipSampler, *, tasks: tuple[str, ...]) -> None:
        self.clips, self.tasks = clips, tasks
        known = [(i, entry) for i, entry in enumerate(clips.entries) if entry.task in tasks]
        self._episode = {(tasks.index(entry.task), entry.seed): i for i, entry in known}

    def starts(self, count: int) -> list[StartState]:
        """The first ``count`` of them, in the order of recording."""
        return [StartState(task=task, seed=seed) for task, seed in list(self._episode)[:count]]

    def moment(self, start: StartState) -> tuple[Clip, int]:
        if (start.task, start.seed) not in self._episode:
            raise WorldModelError(f"no recorded episode of task {start.task} began at seed {start.seed}")
        return self.clips.clip(self._episode[start.task, start.seed], 0, 0), 0


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
        episode, look = self.choose(start)
        return self.clips.clip(episode, look, 0), int(self.clips.look_steps(episode)[look])
