"""Simulators that fail: processes that were replaced, as the environment that owns them reports them, and episodes that
begin again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from sims.errors import UserError

if TYPE_CHECKING:
    from sims.subproc.worker_group import WorkerFailure
    from sims.vector_env import StartState


@runtime_checkable
class RestartingEnv(Protocol):
    """An environment that replaces workers that fail."""

    @property
    def failures(self) -> Sequence[WorkerFailure]: ...


class FreshFailures:
    """Of ``source``, where it is a RestartingEnv; ``first_env``: which environment of all its first one is."""

    def __init__(self, source: object, *, first_env: int = 0) -> None:
        self._source, self._first_env, self._taken = source, first_env, 0

    def take(self) -> list[WorkerFailure]:
        """Since the last call."""
        if not isinstance(self._source, RestartingEnv):
            return []
        fresh = self._source.failures[self._taken :]
        self._taken += len(fresh)
        return [dataclasses.replace(one, env_id=one.env_id + self._first_env) for one in fresh]


class Restarts:
    """How often each episode began again because the simulator failed: one that crashes it would do so for ever."""

    LIMIT = 3

    def __init__(self) -> None:
        self._count = Counter[tuple[int, int]]()

    def add(self, starts: Sequence[StartState]) -> None:
        """These begin again. UserError if one of them has done so ``LIMIT`` times."""
        for start in starts:
            self._count[start.task, start.seed] += 1
            if self._count[start.task, start.seed] > self.LIMIT:
                raise UserError(
                    f"the simulator failed {self.LIMIT + 1} times in the episode of task {start.task} with seed "
                    f"{start.seed}; what it wrote is in the messages above"
                )
