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
from episodes.schema import EpisodeError, StoreFull

CATALOG_NAME = "catalog.sqlite"


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
    id TEXT PRIMARY KEY, task TEXT NOT NULL, instruction TEXT NOT NULL, success INTEGER NOT NULL, steps INTEGER NOT NULL,
    looks INTEGER NOT NULL, bytes INTEGER NOT NULL, source TEXT NOT NULL, split TEXT NOT NULL, seed INTEGER NOT NULL,
    policy_version TEXT NOT NULL, layout TEXT NOT NULL) WITHOUT ROWID"""
_INSERT = f"INSERT OR REPLACE INTO episodes VALUES ({', '.join('?' * len(_COLUMNS))})"


class Catalog:
    """Raises sqlite3.DatabaseError where the file is no usable catalog; the store then rebuilds it."""

    def __init__(self, folder: Path):
        self._path = folder / CATALOG_NAME
        self._lock = threading.Lock()
        self._connection, self._pid = self._connect(), os.getpid()

    def _connect(self) -> sqlite3.Connection:
        connection = sqlite3.connect(self._path, timeout=60.0, check_same_thread=False)
        try:
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=NORMAL")
            connection.execute(_CREATE)
            connection.execute(f"SELECT {', '.join(_COLUMNS)} FROM episodes LIMIT 1").fetchall()
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
        self.replace(removed=(), added=entries)

    def replace(self, *, removed: Iterable[str], added: Iterable[Entry]) -> None:
        """Remove ids and insert entries, in one transaction. Raises StoreFull."""
        rows = [[json.dumps(v) if isinstance(v, dict) else v for v in vars(entry).values()] for entry in added]
        try:
            with self._lock, self._db() as connection:
                connection.executemany("DELETE FROM episodes WHERE id = ?", [(id,) for id in removed])
                connection.executemany(_INSERT, rows)
        except sqlite3.OperationalError as error:
            if "full" not in str(error):
                raise
            raise StoreFull(f"{self._path}: no space left for the catalog; the episodes themselves are safe") from error

    def ids(self) -> set[str]:
        with self._lock:
            return {id for (id,) in self._db().execute("SELECT id FROM episodes")}

    def entries(self) -> list[Entry]:
        """All episodes, oldest first."""
        with self._lock:
            rows = self._db().execute(f"SELECT {', '.join(_COLUMNS)} FROM episodes ORDER BY id").fetchall()
        return [_entry(row) for row in rows]

    def entry(self, id: str) -> Entry:
        with self._lock:
            query = f"SELECT {', '.join(_COLUMNS)} FROM episodes WHERE id = ?"
            row = self._db().execute(query, (id,)).fetchone()
        if row is None:
            raise EpisodeError(f"{self._path.parent}: no episode {id}")
        return _entry(row)

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
