"""Simulator workers that failed in a run and were replaced: failures.jsonl in the run's folder."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sims.errors import UserError
from vla_rl.rollouts.failures import FreshFailures
from vla_rl.runs.metrics import read_records

if TYPE_CHECKING:
    from sims.vector_env import VectorEnv

FAILURES_FILE = "failures.jsonl"
_FIELDS = {"stage": str, "env_id": int, "pid": int, "request": str, "cause": str, "stderr": str}


class FailureLog:
    """Appends the failures of ``env`` and of what else it watches since the last ``write``."""

    def __init__(self, run_dir: Path, env: VectorEnv) -> None:
        self._path = run_dir / FAILURES_FILE
        self._sources = [FreshFailures(env)]

    def watch(self, source: object) -> None:
        """``source``: another environment, or rollouts, whose failures belong to the run from now on."""
        self._sources.append(FreshFailures(source))

    def write(self, stage: str) -> int:
        """Returns how many there were; ``stage``: the part of the run in which they happened."""
        fresh = [failure for source in self._sources for failure in source.take()]
        if fresh:
            with self._path.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps({"stage": stage, **dataclasses.asdict(one)}) + "\n" for one in fresh)
        return len(fresh)


def read_failures(run_dir: Path) -> list[dict[str, Any]]:
    """Every record: {stage, env_id, pid, request, cause, stderr}, as ``read_metrics``; UserError where one has not."""
    path = run_dir / FAILURES_FILE
    records = read_records(path)
    for number, record in enumerate(records, start=1):
        for name, kind in _FIELDS.items():
            if type(value := record.get(name)) is not kind:
                raise UserError(f"{path}: line {number} is no failure ({name} is {value!r}), repair or delete it")
    return records
