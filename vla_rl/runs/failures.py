"""Simulator workers that failed in a run and were replaced: failures.jsonl in the run's folder."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from sims.subproc.worker_group import WorkerFailure
    from sims.vector_env import VectorEnv

FAILURES_FILE = "failures.jsonl"


@runtime_checkable
class RestartingEnv(Protocol):
    """An environment that replaces workers that fail."""

    @property
    def failures(self) -> Sequence[WorkerFailure]: ...


class FailureLog:
    """Appends the failures of ``env`` since the last ``write``."""

    def __init__(self, run_dir: Path, env: VectorEnv) -> None:
        self._path, self._env, self._written = run_dir / FAILURES_FILE, env, 0

    def write(self, stage: str) -> int:
        """Returns how many there were; ``stage``: the part of the run in which they happened."""
        fresh = self._env.failures[self._written :] if isinstance(self._env, RestartingEnv) else ()
        if fresh:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"stage": stage, **dataclasses.asdict(one)}) + "\n" for one in fresh)
        self._written += len(fresh)
        return len(fresh)


def read_failures(run_dir: Path) -> list[dict[str, Any]]:
    """Every record: {stage, env_id, pid, request, cause, stderr}; an incomplete last line is left out."""
    path = run_dir / FAILURES_FILE
    if not path.exists():
        return []
    *lines, _incomplete = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines]
