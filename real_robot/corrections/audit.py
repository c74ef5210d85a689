"""Who did what, when: one JSON object per line, appended and never changed."""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from episodes.files import ends_within_line
from sims.errors import reason


class AuditLog:
    """Thread-safe. A line is with the operating system when ``write`` returns.

    A log that cannot be written (the disk is full) is said once and stops nobody: people must be able to hold a robot.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a+", encoding="utf-8", buffering=1)
        if ends_within_line(self._file):
            self._file.write("\n")
        self._lock = threading.Lock()
        self._failed = False

    def write(self, event: str, *, person: str, **details: Any) -> None:
        line = json.dumps({"time_s": round(time.time(), 3), "event": event, "person": person, **details})
        with self._lock, self._errors_said():
            self._file.write(line + "\n")

    def close(self) -> None:
        with self._errors_said():
            self._file.close()

    @contextlib.contextmanager
    def _errors_said(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._failed:
                print(f"{self._file.name}: the audit log is incomplete: {reason(error)}", file=sys.stderr)
            self._failed = True
