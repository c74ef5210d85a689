"""Who did what, when: one JSON object per line, appended and never changed."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from typing import Any


class AuditLog:
    """Thread-safe. A line is with the operating system when ``write`` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8", buffering=1)
        self._lock = threading.Lock()

    def write(self, event: str, *, person: str, **details: Any) -> None:
        line = json.dumps({"time_s": round(time.time(), 3), "event": event, "person": person, **details})
        with self._lock:
            self._file.write(line + "\n")

    def close(self) -> None:
        self._file.close()
