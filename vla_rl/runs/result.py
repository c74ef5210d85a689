"""``result.json`` of a run: what is read of it, checked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sims.errors import UserError

RESULT_FILE = "result.json"
RATES = ("bc", "rl", "stochastic")  # each {success, interval, ..., per_task: {task: {success, interval, episodes}}}
IMAGINED = ("before", "after")  # learning in a world model; each as one of RATES


def read_result(run_dir: Path) -> dict[str, Any]:
    """Empty until the run is complete. UserError where the file is damaged."""
    path = run_dir / RESULT_FILE
    try:
        result = json.loads(path.read_text()) if path.exists() else {}
    except ValueError as error:
        raise _damaged(path, str(error)) from None
    if not isinstance(result, dict):
        raise _damaged(path, f"not an object but a {type(result).__name__}")
    for name in RATES:
        if name in result and not _is_rate(result[name]):
            raise _damaged(path, f"{name!r} is not a success rate with its interval")
    if "imagined" in result:
        rows = result["imagined"]
        if not isinstance(rows, dict) or not all(_is_rate(rows.get(name)) for name in IMAGINED):
            raise _damaged(path, f"'imagined' is not the success rates {' and '.join(IMAGINED)} with their intervals")
    return result


def with_episodes(per_task: Mapping[str, Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The rows of tasks that there were episodes of; the others have no success."""
    return {task: row for task, row in per_task.items() if row.get("episodes") != 0}


def _is_rate(row: Any) -> bool:
    """Whether ``row`` and its tasks with episodes are {success, interval: [low, high]}."""
    if not isinstance(row, dict) or not isinstance(row.get("interval"), list):
        return False
    numbers, tasks = [row.get("success"), *row["interval"]], row.get("per_task", {})
    if len(numbers) != 3 or not all(isinstance(one, int | float) for one in numbers):
        return False
    named = isinstance(tasks, dict) and all(isinstance(task, dict) for task in tasks.values())
    return named and all(map(_is_rate, with_episodes(tasks).values()))


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"{path} is damaged ({what}); delete it, and vla-rl train --resume writes it again")
