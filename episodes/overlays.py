"""Labels on episodes, which themselves never change: append-only JSON lines beside them; the latest value wins.

Two keys mean something to the store: ``deleted`` (a tombstone) and ``success`` (a verdict that overrules the recorded
one).
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
    """Durable when it returns. Processes may append at once."""
    record = {"episode": episode, "key": key, "value": value, "author": author, "time_s": time.time()}
    descriptor = os.open(folder / LABELS_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
    with os.fdopen(descriptor, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"  # a writer died in mid-line
        file.write((b"\n" if torn else b"") + json.dumps(record).encode() + b"\n")
        file.flush()
        os.fsync(descriptor)


def read_labels(folder: Path) -> tuple[Labels, int]:
    """All labels, and how many lines are torn (a writer died in mid-line) and were passed over."""
    labels: Labels = {}
    torn = 0
    path = folder / LABELS_NAME
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            record = json.loads(line)
            labels.setdefault(record["episode"], {})[record["key"]] = record["value"]
        except (ValueError, KeyError, TypeError):
            torn += bool(line.strip())
    return labels, torn
