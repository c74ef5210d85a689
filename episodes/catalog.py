"""The index of a store: one SQLite table that a scan of the episode files can always rebuild.

It is a cache, so commits are not synced to disk; WAL mode lets several processes write at once.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from episodes.archive import Layout

CATALOG_NAME = "catalog.sqlite"
_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One episode as the catalog knows it. ``bytes`` is the size of its file."""

    id: str
    task: str
    instruction: str
    success: bool
    steps: int
    looks: int
    bytes: int
    source: str
    split: str
    seed: int
    policy_version: str
    layout: Layout


_COLUMNS = tuple(Entry.__dataclass_fields__)
_CREATE = """CREATE TABLE IF NOT EXISTS episodes (
    id TEXT PRIMARY KEY, task TEXT NOT NULL, instruction TEXT NOT NULL, success INTEGER NOT NULL,
    steps INTEGER NOT NULL, looks INTEGER NOT NULL, bytes INTEGER NOT NULL, source TEXT NOT NULL,
    split TEXT NOT NULL, seed INTEGER NOT NULL, policy_version TEXT NOT NULL, layout TEXT NOT NULL) WITHOUT ROWID"""
_INSERT = f"INSERT OR REPLACE INTO episodes VALUES ({', '.join('?' * len(_COLUMNS))})"


class Catalog:
    """In ``folder``, or in memory if None. Raises sqlite3.DatabaseError where the file is no usable catalog."""

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
                raise sqlite3.DatabaseError(f"catalog of version {version}, this is {_VERSION}")
            if connection.execute("PRAGMA quick_check(1)").fetchone() != ("ok",):
                raise sqlite3.DatabaseError("damaged catalog")
        except sqlite3.DatabaseError:
            connection.close()
            raise
        return connection

    def _db(self) -> sqlite3.Connection:
        if os.getpid() != self._pid:  # SQLite connections must not cross a fork
            self._connection, self._pid = self._connect(), os.getpid()
        return self._connection

    def add(self, entries: Iterable[Entry]) -> None:
        """Insert or replace, in one transaction."""
        rows = [[json.dumps(v) if isinstance(v, dict) else v for v in vars(entry).values()] for entry in entries]
        with self._lock, self._db() as connection:
            connection.executemany(_INSERT, rows)

    def remove(self, ids: Iterable[str]) -> None:
        with self._lock, self._db() as connection:
            connection.executemany("DELETE FROM episodes WHERE id = ?", [(id,) for id in ids])

    def ids(self) -> set[str]:
        with self._lock:
            return {id for (id,) in self._db().execute("SELECT id FROM episodes")}

    def entries(self) -> list[Entry]:
        """All episodes, oldest first."""
        with self._lock:
            rows = self._db().execute(f"SELECT {', '.join(_COLUMNS)} FROM episodes ORDER BY id").fetchall()
        return [_entry(row) for row in rows]

    def entry(self, id: str) -> Entry | None:
        with self._lock:
            query = f"SELECT {', '.join(_COLUMNS)} FROM episodes WHERE id = ?"
            row = self._db().execute(query, (id,)).fetchone()
        return None if row is None else _entry(row)

    def close(self) -> None:
        if os.getpid() == self._pid:
            self._connection.close()


def _entry(row: Sequence) -> Entry:
    values = dict(zip(_COLUMNS, row, strict=True))
    layout = {name: (offset, dtype, tuple(shape)) for name, (offset, dtype, shape) in json.loads(row[-1]).items()}
    return Entry(**{**values, "success": bool(values["success"]), "layout": layout})


def delete_catalog(folder: Path) -> None:
    for suffix in ("", "-wal", "-shm"):
        (folder / (CATALOG_NAME + suffix)).unlink(missing_ok=True)
