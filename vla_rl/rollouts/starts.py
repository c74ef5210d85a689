"""Start states of training episodes: tasks in turn, or more of those that fail."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from sims.devices.crossing import crossing
from sims.numbers.seeding import spawn_seed
from sims.starts import start_state
from sims.vector_env import StartState
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.shard import WHOLE, Shard

DECAY = 0.9  # of a task's running success rate, per rollout in which an episode of it ended


class TrainingStarts:
    """The stream "train" in order. Task k is drawn with weight 1 - failure_weight * (its running success rate).

    ``failure_weight`` 0: tasks in turn. Towards 1, tasks that still fail are trained more; evaluation always weighs
    all tasks equally. Of several shards each has its own part of the stream, in which tasks take turns as well.
    """

    def __init__(self, *, seed: int, num_tasks: int, failure_weight: float, shard: Shard = WHOLE) -> None:
        self.seed, self.num_tasks, self.failure_weight, self.shard = seed, num_tasks, failure_weight, shard
        self.next_index = 0
        self.success = np.zeros(num_tasks)

    def take(self, count: int) -> list[StartState]:
        first, self.next_index = self.next_index, self.next_index + count
        return [self._start(self._in_stream(index)) for index in range(first, first + count)]

    def _in_stream(self, index: int) -> int:
        """Number in the whole stream: a turn of all tasks belongs to one shard, the next turn to the next shard."""
        turn, task = divmod(index, self.num_tasks)
        return (turn * self.shard.count + self.shard.index) * self.num_tasks + task

    def _start(self, index: int) -> StartState:
        start = start_state("train", seed=self.seed, index=index, num_tasks=self.num_tasks)
        if self.failure_weight == 0:
            return start
        weight = 1 - self.failure_weight * self.success
        task = np.random.default_rng(spawn_seed(start.seed, "task")).choice(self.num_tasks, p=weight / weight.sum())
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
        return {"next_index": self.next_index, "success": self.success.copy()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.next_index, self.success = state["next_index"], state["success"]
