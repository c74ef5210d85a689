"""Labels on episodes: append-only JSON lines beside the immutable episode files; the latest value of a key counts.

The store uses two keys: ``deleted`` hides the episode, ``success`` replaces the recorded success.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from pathlib import Path

LABELS_NAME = "labels.jsonl"
DELETED, SUCCESS = "deleted", "success"

LabelValue = bool | int | float | str
Labels = dict[str, dict[str, LabelValue]]  # episode id -> key -> value


def append_label(folder: Path, *, episode: str, key: str, value: LabelValue, author: str) -> None:
    """Append one label, synced to disk when it returns. Several processes may append at once."""
    record = {"episode": episode, "key": key, "value": value, "author": author, "time_s": time.time()}
    descriptor = os.open(folder / LABELS_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        incomplete = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # a writer was killed within a line
        file.write((b"\n" if incomplete else b"") + json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(descriptor)


def read_labels(folder: Path) -> tuple[Labels, int]:
    """All labels, and the number of incomplete lines (their writer was killed), which are skipped."""
    labels: Labels = {}
    incomplete = 0
    path = folder / LABELS_NAME
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            labels.setdefault(record["episode"], {})[record["key"]] = record["value"]
        except (ValueError, KeyError, TypeError):
            incomplete += bool(line.strip())
    return labels, incomplete
