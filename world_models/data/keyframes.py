"""Where imagined episodes start: recorded observations, chosen from a StartState's task and seed alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from sims.numbers.ranges import PositiveInt, Share
from sims.vector_env import StartState
from world_models.data.clip import Clip
from world_models.data.clip_sampler import ClipSampler
from world_models.world_model import WorldModelError


@dataclass(frozen=True, kw_only=True)
class KeyframeConfig:
    """``episode_starts``: share of imagined episodes that start where a recorded episode does.

    The others start at keyframes, ``before_end`` (shortest, longest) control steps before a recorded end, where little
    prediction error has accumulated when the episode is decided (WoVR). ``failures``: share of the keyframes that are
    from failed episodes. Episodes whose outcome is unknown have no keyframes.
    """

    episode_starts: Share = 0.5
    before_end: tuple[PositiveInt, PositiveInt] = (8, 32)
    failures: Share = 0.7

    def __post_init__(self) -> None:
        if not self.before_end[0] <= self.before_end[1]:
            raise ValueError(f"keyframes.before_end must be two increasing numbers of steps, got {self.before_end}")


@runtime_checkable
class ImaginedStarts(Protocol):
    """Maps a StartState to the recorded observation that an imagined episode starts from."""

    @property
    def tasks(self) -> tuple[str, ...]: ...

    @property
    def instruction_bytes(self) -> int:
        """Width of the instructions of all clips."""
        ...

    def clip(self, start: StartState) -> tuple[Clip, int]:
        """A clip without predictions and without batch dimension; the control steps before its observation."""
        ...


class RecordedStarts:
    """The starts of recorded ``episodes``: a StartState's seed is the number of its episode among the clips.

    Not the seed that was recorded, which is that of several episodes where imports or parts of a recording are among
    them. WorldModelError where there are none of ``tasks``.
    """

    def __init__(self, clips: ClipSampler, episodes: Sequence[int], *, tasks: tuple[str, ...]) -> None:
        self.clips, self.tasks, self.instruction_bytes = clips, tasks, clips.instruction_bytes
        self._task = {i: tasks.index(clips.entries[i].task) for i in episodes if clips.entries[i].task in tasks}
        if not self._task:
            raise WorldModelError(
                f"no recorded episode of {', '.join(tasks)} to start from, or none begins where its recording does"
            )

    def starts(self, count: int) -> list[StartState]:
        """The first ``count`` of them: of every task in turn, each in the order of recording."""
        every = [StartState(task=task, seed=episode) for episode, task in self._task.items()]
        of_tasks = [[start for start in every if start.task == task] for task in range(len(self.tasks))]
        in_turn = itertools.chain.from_iterable(itertools.zip_longest(*of_tasks))
        return [start for start in in_turn if start is not None][:count]

    def clip(self, start: StartState) -> tuple[Clip, int]:
        """WorldModelError if ``start`` is none of them."""
        if self._task.get(start.seed) != start.task:
            raise WorldModelError(f"no recorded episode {start.seed} of task {start.task}")
        return self.clips.clip(start.seed, 0, 0), 0


class Keyframes:
    """Keyframes and episode starts per task. WorldModelError if no episode of a task was recorded, or, where there are
    to be keyframes, none that is as long as these need."""

    def __init__(self, clips: ClipSampler, config: KeyframeConfig, *, tasks: tuple[str, ...]) -> None:
        self.clips, self.config, self.tasks = clips, config, tasks
        self.instruction_bytes = clips.instruction_bytes
        self._episodes: list[np.ndarray] = []  # per task
        self._near: list[tuple[list[tuple[int, int]], list[tuple[int, int]]]] = []  # success, failure: (episode, obs.)
        for task in tasks:
            episodes = np.array([i for i, entry in enumerate(clips.entries) if entry.task == task], dtype=np.int64)
            if not len(episodes):
                known = sorted({entry.task for entry in clips.entries})
                raise WorldModelError(
                    f"no recorded episode of task {task!r} to start from; recorded are {known}, held-out ones aside"
                )
            self._episodes.append(episodes)
            near = {True: list[tuple[int, int]](), False: list[tuple[int, int]]()}
            for episode in episodes.tolist():
                if (outcome := clips.outcome(episode)) is not None:
                    near[outcome] += self._near_end(episode)
            if config.episode_starts < 1 and not near[True] + near[False]:
                low, high = config.before_end
                raise WorldModelError(
                    f"no episode of task {task!r} whose outcome is known was observed {low} to {high} control steps "
                    "before its end, where keyframes.before_end has imagined episodes start; change it, or set "
                    "keyframes.episode_starts 1"
                )
            self._near.append((near[True], near[False]))

    def _near_end(self, episode: int) -> list[tuple[int, int]]:
        steps = self.clips.observation_steps(episode)
        left = self.clips.undecided_steps(episode) - steps
        low, high = self.config.before_end
        return [(episode, int(at)) for at in np.flatnonzero((left >= low) & (left <= high) & (steps > 0))]

    def choose(self, start: StartState) -> tuple[int, int]:
        """(episode, observation) for ``start``. ValueError for an unknown task."""
        if not 0 <= start.task < len(self.tasks):
            raise ValueError(f"reset: task {start.task} is not in 0..{len(self.tasks) - 1} ({self.tasks})")
        rng = np.random.default_rng([start.seed, start.task])
        succeeded, failed = self._near[start.task]
        near = failed if (rng.random() < self.config.failures and failed) or not succeeded else succeeded
        if rng.random() >= self.config.episode_starts and near:
            return near[rng.integers(len(near))]
        episodes = self._episodes[start.task]
        return int(episodes[rng.integers(len(episodes))]), 0

    def clip(self, start: StartState) -> tuple[Clip, int]:
        episode, observation = self.choose(start)
        return self.clips.clip(episode, observation, 0), int(self.clips.observation_steps(episode)[observation])
