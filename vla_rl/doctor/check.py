"""One check of ``vla-rl doctor`` and the ways to run it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Literal, TypedDict

Status = Literal["ok", "missing", "failed"]


class Check(TypedDict):
    """``missing``: optional and not installed, or does not apply. ``failed``: needed, or installed but broken.

    ``fix``: the next step.
    """

    name: str
    status: Status
    detail: str
    fix: str


def attempt(name: str, do: Callable[[], str], *, fix: str) -> Check:
    """``do`` returns the detail. Any exception in it is the result of the check, so all are caught."""
    try:
        return {"name": name, "status": "ok", "detail": do(), "fix": ""}
    except Exception as error:
        return {"name": name, "status": "failed", "detail": f"{type(error).__name__}: {error}", "fix": fix}


def in_process(code: str, *, timeout_s: float, **environment: str) -> str:
    """Run ``code`` in a new interpreter. Returns its last line; raises RuntimeError with its last error line."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no message"]
        reason = next((line for line in reversed(lines) if "Error" in line), lines[-1])
        signal = f" (killed by signal {-done.returncode})" if done.returncode < 0 else ""
        raise RuntimeError(reason.strip() + signal)
    return done.stdout.strip().splitlines()[-1]
