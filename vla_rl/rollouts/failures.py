"""Simulators that fail: processes that were replaced, as the environment that owns them reports them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from sims.subproc.worker_group import WorkerFailure


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
