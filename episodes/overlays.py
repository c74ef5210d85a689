"""Labels on episodes: append-only JSON lines beside the immutable episode files; the latest value of a key counts.

Latest is by ``time_s``: lines that were made in another folder may come to this one behind later ones.
The store uses seven keys: ``deleted`` hides the episode, ``success`` replaces the recorded success, ``trim`` and
``split`` cut it (cuts.py); with ``outcome`` "abort" or ``rewound_at``, and without ``success``, it is no success,
whatever was recorded (``outcome_unknown``). ``success_from`` is a recorded control step, from which on observations
show success (outcomes/success.py); ``recording`` is the digest of what ``compact`` removed. A label of null takes the
key away, so that what was recorded counts again.
Labels of a part count until the split that made it is taken back; split again, the new part has the id, but not them.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import os
import re
import time
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Literal

from episodes.files import ends_within_line, sync
from episodes.schema import EpisodeError, StoreFull
from sims.errors import is_disk_full

LABELS_NAME = "labels.jsonl"
DELETED, SUCCESS, SUCCESS_FROM = "deleted", "success", "success_from"
TRIM, SPLIT = "trim", "split"
OUTCOME, ABORT, REWOUND_AT = "outcome", "abort", "rewound_at"
RECORDING = "recording"

REPAIR = "repair the line, or leave it empty"  # the numbers of the others stay

LabelValue = bool | int | float | str
EpisodeOutcome = Literal["success", "failure", "unknown"]
OutcomeLabel = Literal["success", "failure", "abort"]  # by a person
Labels = dict[str, dict[str, LabelValue]]  # episode id -> key -> value


@dataclass(frozen=True, kw_only=True)
class LabelChange:
    """One line of the file. ``undoes``: number of the line that it takes back.

    ``undone``: that line itself, in changes that go to another folder, whose lines have other numbers; in no file.
    """

    episode: str
    key: str
    value: LabelValue | None
    author: str
    time_s: float
    undoes: int | None = None
    undone: LabelChange | None = None


_TYPES: Mapping[str, tuple[type, ...]] = {
    "episode": (str,),
    "key": (str,),
    "author": (str,),
    "time_s": (int, float),
    "undoes": (int, type(None)),
}
_NEEDED = _TYPES.keys() - {"undoes"} | {"value"}


def recorded_id(id: str) -> str:
    """Of the episode that ``id`` is, or is a part of."""
    return id.partition(".")[0]


def outcome_unknown(labels: Mapping[str, LabelValue]) -> bool:
    """Whether a person gave the episode up, aborted it or went back in it, and nobody labelled it."""
    return SUCCESS not in labels and (labels.get(OUTCOME) == ABORT or REWOUND_AT in labels)


def is_success(labels: Mapping[str, LabelValue], recorded: bool) -> bool:
    """As it is labelled now; a label of where success begins says that it is one."""
    return bool(labels.get(SUCCESS, recorded or SUCCESS_FROM in labels)) and not outcome_unknown(labels)


def outcome_labelled(labels: Mapping[str, LabelValue]) -> bool:
    """Whether labels say success or failure, or where success begins."""
    return SUCCESS in labels or SUCCESS_FROM in labels


def outcome_of(labels: Mapping[str, LabelValue]) -> EpisodeOutcome | None:
    """What the labels say: "unknown" also of what was deleted; None: nothing, and what was recorded counts."""
    if labels.get(DELETED) or outcome_unknown(labels):
        return "unknown"
    if not outcome_labelled(labels):
        return None
    return "success" if labels.get(SUCCESS, True) else "failure"


def append_labels(folder: Path, *, episode: str, labels: Mapping[str, LabelValue | None], author: str) -> None:
    """All of the same time, synced to disk when it returns. Several processes may append at once. Raises StoreFull."""
    with labels_locked(folder) as file:
        now = _now(change for _, change in _changes(folder, of=episode))
        changes = (
            LabelChange(episode=episode, key=key, value=value, author=author, time_s=now)
            for key, value in labels.items()
        )
        _append(file, *changes)


def append_changes(folder: Path, changes: Iterable[LabelChange]) -> None:
    """Append changes that were made in another folder, but for those that are here already.

    They count as of the time when they were made, so an older one does not overrule what is here. An undo takes back
    the line here that is its ``undone``; where there is none, it counts as a label.
    """
    with labels_locked(folder) as file:
        for _, change in _new_lines(folder, changes):
            _append(file, change)


def labels_with(folder: Path, changes: Iterable[LabelChange]) -> Labels:
    """All labels as they are once ``append_changes`` has added these."""
    return _latest([*_changes(folder), *_new_lines(folder, changes)])


def _new_lines(folder: Path, changes: Iterable[LabelChange]) -> list[tuple[int, LabelChange]]:
    """(line number, change) of those that are not here already, as they are appended."""
    here = [(i, change) for i, change in _changes(folder) if change is not None]
    known = {_moved(change) for _, change in here}
    labels = {_moved(change): i for i, change in here if change.undoes is None}
    lines, first = list[tuple[int, LabelChange]](), len(_lines(folder))
    for change in changes:
        moved, number = _moved(change), first + len(lines)
        if moved in known:
            continue
        undoes = None if change.undone is None else labels.get(_moved(change.undone))
        lines.append((number, replace(moved, undoes=undoes)))
        known.add(moved)
        if undoes is None:
            labels[moved] = number
    return lines


def _now(changes: Iterable[LabelChange | None]) -> float:
    """The time of a change that is later than all of these, also where their clock was ahead."""
    latest = max((change.time_s for change in changes if change is not None), default=-math.inf)
    return max(time.time(), math.nextafter(latest, math.inf))


def _moved(change: LabelChange) -> LabelChange:
    """Without what differs between folders."""
    return replace(change, undoes=None, undone=None)


def undo_labels(folder: Path, *, episode: str, author: str) -> LabelChange | None:
    """Take back the last change of the episode's labels that still holds, and all that were made together with it.

    Returns the last of them, None if there is none. Called again it takes back what was changed before. The lines stay,
    with who undid them. What ``compact`` labelled is not taken back: nobody who undoes means that.
    """
    if not (folder / LABELS_NAME).exists():
        return None
    with labels_locked(folder) as file:
        lines = list(_changes(folder, of=episode))
        counting = _counting(lines)[recorded_id(episode)]
        changes = [(i, change) for i, change in counting if change.episode == episode and change.key != RECORDING]
        undone = {change.undoes for _, change in changes}
        holding = [(i, change) for i, change in changes if change.undoes is None and i not in undone]
        if not holding:
            return None
        last = holding[-1][1]
        together = [(i, change) for i, change in holding if _press(change) == _press(last)]
        before = {change.key: change.value for _, change in holding if _press(change) != _press(last)}
        now = _now(change for _, change in lines)
        undos = [
            LabelChange(
                episode=episode, key=change.key, value=before.get(change.key), author=author, time_s=now, undoes=i
            )
            for i, change in reversed(together)
        ]
        _append(file, *undos)
    return last


def _press(change: LabelChange) -> tuple[str, float]:
    """The same of what ``append_labels`` changed together."""
    return change.author, change.time_s


def read_labels(folder: Path) -> tuple[Labels, int]:
    """All labels, and the number of incomplete lines (their writer was killed), which are skipped."""
    changes = list(_changes(folder))
    return _latest(changes), sum(change is None for _, change in changes)


def _latest(changes: Iterable[tuple[int, LabelChange | None]]) -> Labels:
    """What these lines say together: the latest that was not taken back, whoever else labelled meanwhile."""
    lines = list(itertools.chain.from_iterable(_counting(changes).values()))
    undone = {change.undoes for _, change in lines} & {number for number, _ in lines}
    labels: Labels = {}
    for number, change in lines:
        if number in undone or change.undoes in undone:
            continue
        if change.value is None:
            labels.get(change.episode, {}).pop(change.key, None)
        else:
            labels.setdefault(change.episode, {})[change.key] = change.value
    return labels


def read_history(folder: Path, episodes: Collection[str]) -> list[LabelChange]:
    """Every change of these episodes' labels, oldest first."""
    return [change for _, change in _in_time(_changes(folder)) if change.episode in episodes]


def read_changes(folder: Path) -> list[LabelChange]:
    """Every complete line, in their order, for another folder: undos have their ``undone``."""
    changes = dict(_changes(folder))
    return [
        change if change.undoes is None else replace(change, undone=changes.get(change.undoes))
        for change in changes.values()
        if change is not None
    ]


@contextlib.contextmanager
def labels_locked(folder: Path) -> Iterator[BinaryIO]:
    """The file of labels, to append to; nobody else appends meanwhile. Raises StoreFull."""
    try:
        with open(os.open(folder / LABELS_NAME, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644), "rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not file.seek(0, os.SEEK_END):  # it may be new
                sync(folder)
            yield file
    except OSError as error:
        if is_disk_full(error):
            raise StoreFull(f"{folder}: no space left for a label: free some space and try again") from error
        raise


def _append(file: BinaryIO, *changes: LabelChange) -> None:
    lines = b"".join(_line(change) for change in changes)
    file.write((b"\n" if ends_within_line(file) else b"") + lines)
    file.flush()
    os.fsync(file.fileno())


def _line(change: LabelChange) -> bytes:
    optional = ("undoes", "undone")
    record = {name: value for name, value in asdict(change).items() if name not in optional or value is not None}
    return json.dumps(record).encode() + b"\n"


def _changes(folder: Path, *, of: str = "") -> Iterator[tuple[int, LabelChange | None]]:
    """(line number, change) of every line that is not empty; None for an incomplete one.

    ``of``: only the lines in which the id of this recorded episode, or of the one it is a part of, occurs.
    EpisodeError for a line with a value that its key does not have.
    """
    id = recorded_id(of).encode()
    for number, line in enumerate(_lines(folder)):
        if not line.strip() or id not in line:
            continue
        try:
            fields = json.loads(line)
        except ValueError:
            fields = None
        if not isinstance(fields, dict) or not _NEEDED <= fields.keys() <= _NEEDED | {"undoes"}:
            yield number, None
            continue
        if problem := label_problem(fields):
            raise EpisodeError(f"{folder / LABELS_NAME}: line {number + 1}: {problem}; {REPAIR}")
        yield number, LabelChange(**fields)


def label_problem(fields: Mapping[str, Any]) -> str:
    """What is wrong with those of a change that was not made here, as of a line that somebody has edited; or ""."""
    for name, types in _TYPES.items():
        if type(value := fields.get(name)) not in types:
            return f"{name} is {value!r}"
    key, value = fields["key"], fields["value"]
    if value is None:
        return ""
    if key in (SPLIT, SUCCESS_FROM) and type(value) is not int:
        return f"{key} is {value!r}, not a step"
    if key == TRIM and not _is_trim(value):
        return f'{key} is {value!r}, not two steps like "2-9"'
    return "" if isinstance(value, LabelValue) else f"{key} is {value!r}, not a number, a text, true or false"


def _is_trim(value: object) -> bool:
    steps = re.fullmatch(r"(\d+)-(\d+)", value) if isinstance(value, str) else None
    return steps is not None and int(steps[1]) < int(steps[2])


def _counting(changes: Iterable[tuple[int, LabelChange | None]]) -> Mapping[str, list[tuple[int, LabelChange]]]:
    """Recorded episode -> the changes of it and its parts, without those of parts whose split is not the same since."""
    counting: Mapping[str, list[tuple[int, LabelChange]]] = defaultdict(list)
    for number, change in _in_time(changes):
        lines = counting[recorded_id(change.episode)]
        if change.key == SPLIT:
            own = (one.value for _, one in reversed(lines) if (one.episode, one.key) == (change.episode, SPLIT))
            if change.value != next(own, None):
                lines[:] = [line for line in lines if not _is_part(line[1].episode, of=change.episode)]
        lines.append((number, change))
    return counting


def _in_time(changes: Iterable[tuple[int, LabelChange | None]]) -> list[tuple[int, LabelChange]]:
    """Oldest first, in whichever order they came to this folder: folders that exchanged theirs read the same."""
    complete = [(number, change) for number, change in changes if change is not None]
    return sorted(complete, key=lambda line: line[1].time_s)


def _is_part(id: str, *, of: str) -> bool:
    """Whether ``id`` is a part of the episode ``of``, or a part of its parts."""
    (first, end), (low, high) = _span(id), _span(of)
    return id != of and low <= first and end <= high


def _span(id: str) -> tuple[float, float]:
    """The recorded steps of a part; of a recorded episode all."""
    steps = re.search(r"\.(\d+)-(\d+)$", id)
    return (int(steps[1]), int(steps[2])) if steps else (0, math.inf)


def _lines(folder: Path) -> list[bytes]:
    path = folder / LABELS_NAME
    return path.read_bytes().splitlines() if path.exists() else []
