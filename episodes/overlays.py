"""Labels on episodes: append-only JSON lines beside the immutable episode files; the latest value of a key counts.

The store uses six keys: ``deleted`` hides the episode, ``success`` replaces the recorded success, ``trim`` and
``split`` cut it (cuts.py); with ``outcome`` "abort" or ``rewound_at``, and without ``success``, it is no success,
whatever was recorded (``outcome_unknown``). ``success_from``, a recorded control step, is read by success classifiers:
from there on observations show success. A label of null takes the key away, so that what was recorded counts again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import BinaryIO, Literal

LABELS_NAME = "labels.jsonl"
DELETED, SUCCESS, SUCCESS_FROM = "deleted", "success", "success_from"
OUTCOME, ABORT, REWOUND_AT = "outcome", "abort", "rewound_at"

LabelValue = bool | int | float | str
Verdict = Literal["success", "failure", "unknown"]
Labels = dict[str, dict[str, LabelValue]]  # episode id -> key -> value


@dataclass(frozen=True, kw_only=True)
class LabelChange:
    """One line of the file. ``undoes``: number of the line that it takes back."""

    episode: str
    key: str
    value: LabelValue | None
    author: str
    time_s: float
    undoes: int | None = None


def outcome_unknown(labels: Mapping[str, LabelValue]) -> bool:
    """Whether a person gave the episode up, aborted it or went back in it, and nobody judged it."""
    return SUCCESS not in labels and (labels.get(OUTCOME) == ABORT or REWOUND_AT in labels)


def is_success(labels: Mapping[str, LabelValue], recorded: bool) -> bool:
    """As it is labelled now."""
    return bool(labels.get(SUCCESS, recorded)) and not outcome_unknown(labels)


def judged(labels: Mapping[str, LabelValue]) -> Verdict | None:
    """What the labels say: "unknown" also of what was deleted; None: nothing, and what was recorded counts."""
    if labels.get(DELETED) or outcome_unknown(labels):
        return "unknown"
    if SUCCESS not in labels:
        return None
    return "success" if labels[SUCCESS] else "failure"


def append_label(folder: Path, *, episode: str, key: str, value: LabelValue | None, author: str) -> None:
    """Append one label, synced to disk when it returns. Several processes may append at once."""
    with open(os.open(folder / LABELS_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644), "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        _append(file, LabelChange(episode=episode, key=key, value=value, author=author, time_s=time.time()))


def append_changes(folder: Path, changes: Iterable[LabelChange]) -> None:
    """Append changes that were made in another folder, but for those that are here already."""
    with open(os.open(folder / LABELS_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644), "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        known = set(read_changes(folder))
        for change in changes:
            moved = replace(change, undoes=None)  # it counts the lines of the other folder
            if moved not in known:
                _append(file, moved)


def undo_label(folder: Path, *, episode: str, author: str) -> LabelChange | None:
    """Take back the last change of the episode's labels that still holds; returns that change, None if there is none.

    Called again it takes back the one before. The lines stay, with who undid them.
    """
    if not (folder / LABELS_NAME).exists():
        return None
    with open(folder / LABELS_NAME, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        changes = [(i, change) for i, change in _changes(folder) if change is not None and change.episode == episode]
        undone = {change.undoes for _, change in changes}
        holding = [(i, change) for i, change in changes if change.undoes is None and i not in undone]
        if not holding:
            return None
        number, last = holding.pop()
        value = next((change.value for _, change in reversed(holding) if change.key == last.key), None)
        now = time.time()
        _append(file, LabelChange(episode=episode, key=last.key, value=value, author=author, time_s=now, undoes=number))
    return last


def read_labels(folder: Path) -> tuple[Labels, int]:
    """All labels, and the number of incomplete lines (their writer was killed), which are skipped."""
    labels: Labels = {}
    incomplete = 0
    for _, change in _changes(folder):
        if change is None:
            incomplete += 1
        elif change.value is None:
            labels.get(change.episode, {}).pop(change.key, None)
        else:
            labels.setdefault(change.episode, {})[change.key] = change.value
    return labels, incomplete


def read_history(folder: Path, episodes: Collection[str]) -> list[LabelChange]:
    """Every change of these episodes' labels, oldest first."""
    return [change for _, change in _changes(folder) if change is not None and change.episode in episodes]


def read_changes(folder: Path) -> list[LabelChange]:
    """Every complete line, oldest first."""
    return [change for _, change in _changes(folder) if change is not None]


def _append(file: BinaryIO, change: LabelChange) -> None:
    size = file.seek(0, os.SEEK_END)
    incomplete = size > 0 and os.pread(file.fileno(), 1, size - 1) != b"\n"  # a writer was killed within a line
    record = {name: value for name, value in asdict(change).items() if name != "undoes" or value is not None}
    file.write((b"\n" if incomplete else b"") + json.dumps(record).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def _changes(folder: Path) -> Iterator[tuple[int, LabelChange | None]]:
    """(line number, change) of every line that is not empty; None for an incomplete one."""
    path = folder / LABELS_NAME
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else []):
        if not line.strip():
            continue
        try:
            yield number, LabelChange(**json.loads(line))
        except (ValueError, TypeError):
            yield number, None
