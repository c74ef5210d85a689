"""The index of a store: one SQLite table that can always be rebuilt from the episode files.

It is a cache, so commits are not synced to disk. WAL mode lets several processes write at once.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from episodes.archive import ArrayLocations, corrupt, map_arrays, read_directory, verify_archive
from episodes.packing import ATTRIBUTES
from episodes.schema import ARRAYS, SCHEMA

CATALOG_NAME = "catalog.sqlite"
_VERSION = 3
_FROM_ATTRIBUTES = ("id", "task", "instruction", "source", "split", "seed", "control_hz", "policy_version")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One episode in the catalog.

    ``steps``, ``observations``: how many. ``bytes``: size of the file. ``locations``: of the arrays in it. ``span``:
    the first control step that is read, and the one after the last, where the episode was cut. ``ends_as_labelled``:
    whether its end is that of the episode whose success was labelled, not so of the earlier parts of that. Neither is
    in the table.
    """

    id: str
    task: str
    instruction: str
    success: bool
    steps: int
    observations: int
    bytes: int
    source: str
    split: str
    seed: int
    control_hz: float
    policy_version: str
    locations: ArrayLocations
    span: tuple[int, int] | None = None
    ends_as_labelled: bool = True

    @property
    def first(self) -> int:
        """The recorded control step that is step 0."""
        return self.span[0] if self.span else 0

    @property
    def fold(self) -> int:
        """0 to 9, by task and seed: where episodes are divided by it, no start is on both sides."""
        return zlib.crc32(f"{self.task}/{self.seed}".encode()) % FOLDS


FOLDS = 10
_COLUMNS = tuple(name for name in Entry.__dataclass_fields__ if name not in ("span", "ends_as_labelled"))
_CREATE = """CREATE TABLE IF NOT EXISTS episodes (
    id TEXT PRIMARY KEY, task TEXT NOT NULL, instruction TEXT NOT NULL, success INTEGER NOT NULL,
    steps INTEGER NOT NULL, observations INTEGER NOT NULL, bytes INTEGER NOT NULL, source TEXT NOT NULL,
    split TEXT NOT NULL, seed INTEGER NOT NULL, control_hz REAL NOT NULL, policy_version TEXT NOT NULL,
    locations TEXT NOT NULL) WITHOUT ROWID"""
_INSERT = f"INSERT OR REPLACE INTO episodes VALUES ({', '.join('?' * len(_COLUMNS))})"


class Catalog:
    """In ``folder``, or in memory if None. Raises sqlite3.DatabaseError if it is damaged or of another version."""

    def __init__(self, folder: Path | None):
        self._path = ":memory:" if folder is None else folder / CATALOG_NAME
        self._lock = threading.Lock()
        self._connection, self._pid = self._connect(), os.getpid()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=60.0, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,):
                connection.execute(_CREATE)
                connection.execute(f"PRAGMA user_version={_VERSION}")
            elif version != _VERSION:
                raise sqlite3.DatabaseError(f"catalog version is {version}, expected {_VERSION}")
            if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("damaged catalog")
        except sqlite3.DatabaseError:
            connection.close()
            raise
        return connection

    def _db(self) -> sqlite3.Connection:
        if os.getpid() != self._pid:  # SQLite connections must not be used after a fork
            self._connection, self._pid = self._connect(), os.getpid()
        return self._connection

    def add(self, entries: Iterable[Entry]) -> None:
        """Insert or replace, in one transaction."""
        self.replace((), entries)

    def replace(self, ids: Iterable[str], entries: Iterable[Entry]) -> None:
        """Remove those of ``ids``, then ``add``, in one transaction."""
        rows = [[_to_column(getattr(entry, name)) for name in _COLUMNS] for entry in entries]
        with self._lock, self._db() as connection:
            connection.executemany("DELETE FROM episodes WHERE id = ?", [(id,) for id in ids])
            connection.executemany(_INSERT, rows)

    def ids(self) -> set[str]:
        with self._lock:
            return {id for (id,) in self._db().execute("SELECT id FROM episodes")}

    def entries(self) -> list[Entry]:
        """All episodes, oldest first."""
        with self._lock:
            rows = self._db().execute(f"SELECT {', '.join(_COLUMNS)} FROM episodes ORDER BY id").fetchall()
        return [_from_row(row) for row in rows]

    def entry(self, id: str) -> Entry | None:
        with self._lock:
            query = f"SELECT {', '.join(_COLUMNS)} FROM episodes WHERE id = ?"
            row = self._db().execute(query, (id,)).fetchone()
        return None if row is None else _from_row(row)

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._connection.close()


def _to_column(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


def _from_row(row: Sequence) -> Entry:
    values = dict(zip(_COLUMNS, row, strict=True))
    stored = json.loads(values["locations"])
    locations = {name: (offset, dtype, tuple(shape)) for name, (offset, dtype, shape) in stored.items()}
    return Entry(**{**values, "success": bool(values["success"]), "locations": locations})


def delete_catalog(folder: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        (folder / (CATALOG_NAME + suffix)).unlink(missing_ok=True)


def read_entry(path: Path) -> Entry:
    """The entry of an episode file, from the file alone. Raises CorruptEpisode."""
    try:
        return _read_entry(path)
    except Exception:
        verify_archive(path)  # says so if the file is damaged, whatever came of that
        raise


def _read_entry(path: Path) -> Entry:
    locations, attributes = read_directory(path)
    if (schema := attributes.get("schema")) != SCHEMA:
        raise corrupt(path, f"schema is {schema!r}, this version reads {SCHEMA!r}")
    missing = set(ARRAYS) - set(locations) | set(ATTRIBUTES) - set(attributes)
    if missing:
        raise corrupt(path, f"without {', '.join(sorted(missing))}")
    size = path.stat().st_size
    arrays = map_arrays(path, locations, size=size)  # all of them: that they lie within the file
    return make_entry(attributes, locations, success=bool(arrays["success"].any()), size=size)


def make_entry(attributes: Mapping[str, Any], locations: ArrayLocations, *, success: bool, size: int) -> Entry:
    """The entry of a file of ``size`` bytes with these attributes and arrays."""
    steps, observations = locations["action"][2][0], locations["state"][2][0]
    return Entry(
        **{name: attributes[name] for name in _FROM_ATTRIBUTES},
        success=success,
        steps=steps,
        observations=observations,
        bytes=size,
        locations=locations,
    )
