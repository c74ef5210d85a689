"""Start states of training episodes: tasks in turn, or more of those that fail or have most left to learn."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from sims.devices.crossing import crossing
from sims.numbers.ranges import PositiveFloat, PositiveInt
from sims.numbers.seeding import spawn_seed
from sims.starts import start_state
from sims.vector_env import StartState
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.shard import WHOLE, Shard

DECAY = 0.9  # of a task's running success rate, per rollout in which an episode of it ended


@dataclass(frozen=True, kw_only=True)
class UCBConfig:
    """``window``: of each task the last so many episodes count. ``temperature``: towards 0 the task with the highest
    bound is drawn alone."""

    window: PositiveInt = 300
    temperature: PositiveFloat = 0.1


class TaskUCB:
    """Tasks by how much is left to learn in them: task k with probability softmax(U / temperature)_k, where

        U_k = mean |A| of its last ``window`` episodes + sqrt(2 ln(n + 1) / (n_k + 1)).

    A is an episode's advantage in its group, n_k the number of episodes of task k so far, n that of all tasks (Wang et
    al. 2025, DUMP, arXiv:2504.09710; constants as in the authors' code). With outcomes 0 and 1, scaled by their
    standard deviation, |A| is 2 sqrt(p (1 - p)) on average: 1 where half of a group succeeds, 0 where all or none do.
    """

    def __init__(self, config: UCBConfig, num_tasks: int) -> None:
        self.config = config
        self.episodes = np.zeros(num_tasks, dtype=np.int64)
        self.recent = [np.zeros(0) for _ in range(num_tasks)]

    def probabilities(self) -> Float[np.ndarray, " tasks"]:
        learnable = np.array([recent.mean() if len(recent) else 0.0 for recent in self.recent])
        bound = learnable + np.sqrt(2 * np.log(self.episodes.sum() + 1) / (self.episodes + 1))
        weight = np.exp((bound - bound.max()) / self.config.temperature)
        return np.asarray(weight / weight.sum())

    def learn(self, task: Int[np.ndarray, " n"], advantage: Float[np.ndarray, " n"]) -> None:
        """Of ``n`` episodes."""
        for k in range(len(self.recent)):
            fresh = np.abs(advantage[task == k]).astype(np.float64)
            self.recent[k] = np.concatenate([self.recent[k], fresh])[-self.config.window :]
            self.episodes[k] += len(fresh)

    def state_dict(self) -> dict[str, Any]:
        return {"episodes": self.episodes.copy(), "recent": [recent.copy() for recent in self.recent]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.episodes, self.recent = state["episodes"].copy(), [recent.copy() for recent in state["recent"]]


class TrainingStarts:
    """The stream "train" in order. Task k is drawn with weight 1 - failure_weight * (its running success rate).

    ``failure_weight`` 0: tasks in turn. Towards 1, tasks that still fail are trained more; evaluation always weighs
    all tasks equally. ``ucb``, where an algorithm sets it, draws them instead. Of several shards each has its own part
    of the stream, in which tasks take turns as well.
    """

    def __init__(self, *, seed: int, num_tasks: int, failure_weight: float, shard: Shard = WHOLE) -> None:
        self.seed, self.num_tasks, self.failure_weight, self.shard = seed, num_tasks, failure_weight, shard
        self.next_index = 0
        self.success = np.zeros(num_tasks)
        self.ucb: TaskUCB | None = None

    def take(self, count: int) -> list[StartState]:
        first, self.next_index = self.next_index, self.next_index + count
        return [self._start(self._in_stream(index)) for index in range(first, first + count)]

    def _in_stream(self, index: int) -> int:
        """Number in the whole stream: a turn of all tasks belongs to one shard, the next turn to the next shard."""
        turn, task = divmod(index, self.num_tasks)
        return (turn * self.shard.count + self.shard.index) * self.num_tasks + task

    def _start(self, index: int) -> StartState:
        start = start_state("train", seed=self.seed, index=index, num_tasks=self.num_tasks)
        if self.ucb is not None:
            probability = self.ucb.probabilities()
        elif self.failure_weight:
            weight = 1 - self.failure_weight * self.success
            probability = weight / weight.sum()
        else:
            return start
        task = np.random.default_rng(spawn_seed(start.seed, "task")).choice(self.num_tasks, p=probability)
        return dataclasses.replace(start, task=int(task))

    def learn(self, rollout: Experience) -> None:
        """Update the running success rates by the episodes that ended."""
        with crossing("outcomes"):
            ended, task_of, succeeded = (
                part.cpu() for part in (rollout.done & rollout.valid, rollout.task, rollout.success)
            )
        for task in task_of[ended].unique().tolist():
            success = succeeded[ended & (task_of == task)].float().mean().item()
            self.success[task] = DECAY * self.success[task] + (1 - DECAY) * success

    def state_dict(self) -> dict[str, Any]:
        ucb = {} if self.ucb is None else {"ucb": self.ucb.state_dict()}
        return {"next_index": self.next_index, "success": self.success.copy()} | ucb

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_index, self.success = state["next_index"], state["success"].copy()
        if self.ucb is not None:
            self.ucb.load_state_dict(state["ucb"])
