"""A folder of episodes that survives crashes.

    STORE/ep-<ulid>.zarr.zip   one immutable episode each, a zarr v3 group any zarr reader opens
    STORE/catalog.sqlite       an index; a scan rebuilds it
    STORE/labels.jsonl         append-only labels and tombstones

An episode is committed by its rename: written to a temporary file, synced, renamed, and the folder synced. Whatever
kills the writer, every file with an episode's name is whole. Any number of processes may write at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from episodes.archive import Layout, corrupt, map_arrays, read_directory, write_archive
from episodes.catalog import Catalog, Entry, delete_catalog
from episodes.overlays import DELETED, SUCCESS, LabelValue, append_label, read_labels
from episodes.packing import ATTRIBUTES, Arrays, pack, unpack
from episodes.schema import ARRAYS, SCHEMA, CorruptEpisode, Episode, EpisodeError, StoreFull, validate

_SUFFIX = ".zarr.zip"
_STALE_S = 3600.0
_CATALOGUED = ("id", "task", "instruction", "source", "split", "seed", "policy_version")
_UNWRITABLE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which episodes: every condition that is not None must hold."""

    tasks: tuple[str, ...] | None = None
    sources: tuple[str, ...] | None = None
    splits: tuple[str, ...] | None = None
    success: bool | None = None

    def matches(self, entry: Entry) -> bool:
        return (
            (self.tasks is None or entry.task in self.tasks)
            and (self.sources is None or entry.source in self.sources)
            and (self.splits is None or entry.split in self.splits)
            and (self.success is None or entry.success == self.success)
        )


EVERYTHING = Selection()


class EpisodeStore:
    """``create`` makes the folder if it is missing. ``jpeg_quality`` (1-95): store images as JPEG; None: exactly.

    Opening brings the catalog up to date with the folder, and rebuilds it if it is missing or unreadable.
    ``corrupt`` lists the files that could not be catalogued.
    """

    def __init__(self, path: str | Path, *, create: bool = False, jpeg_quality: int | None = None):
        self.path = Path(path)
        self.corrupt: dict[str, str] = {}
        self._jpeg_quality = jpeg_quality
        if jpeg_quality is not None and not 1 <= jpeg_quality <= 95:
            raise EpisodeError(f"jpeg_quality is {jpeg_quality}, allowed is 1 to 95, or None for exact images")
        if create and not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            _sync_folder(self.path.parent)
        if not self.path.is_dir():
            hint = f"vla-rl collect CONFIG --episodes N --out {self.path}"
            raise EpisodeError(f"{self.path}: no such episode store. Record one with: {hint}")
        with self._repair_lock():
            self._catalog = self._open_catalog()

    # -- writing ---------------------------------------------------------------------------------------------------

    def add(self, episode: Episode) -> str:
        """Commit one episode; durable when it returns. Returns its id. Raises InvalidEpisode, StoreFull."""
        return self.add_all([episode])[0]

    def add_all(self, episodes: Iterable[Episode]) -> list[str]:
        """As ``add`` for each, syncing folder and catalog once. If one is refused, those before it stay committed."""
        written: list[Entry] = []
        try:
            for episode in episodes:
                validate(episode)
                written.append(self._write(episode))
        finally:
            if written:
                _sync_folder(self.path)
                self._try_catalog(lambda catalog: catalog.add(written))
        return [entry.id for entry in written]

    def _write(self, episode: Episode) -> Entry:
        arrays, attributes = pack(episode, jpeg_quality=self._jpeg_quality)
        final, temporary = self.file(episode.id), self.path / f".ep-{episode.id}.tmp"
        if final.exists():
            raise EpisodeError(f"{final}: this episode is already in the store; episodes never change")
        try:
            with open(temporary, "xb", buffering=1 << 16) as file:
                layout = write_archive(file, arrays=arrays, attributes=attributes)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            os.rename(temporary, final)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno in _FULL:
                megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
                raise StoreFull(
                    f"{self.path}: no space left for episode {episode.id} of {megabytes:.1f} MB: "
                    f"{error.strerror}. All episodes committed before are intact; free some space and go on"
                ) from error
            raise
        return _entry(attributes, layout, success=episode.succeeded, size=size)

    def label(self, id: str, key: str, value: LabelValue, *, author: str) -> None:
        """Append a label; the episode's file stays as it is. ``select`` heeds ``success`` and ``deleted``."""
        self._entry(id)
        append_label(self.path, episode=id, key=key, value=value, author=author)

    def delete(self, id: str, *, author: str) -> None:
        """A tombstone: the episode is no longer selected. ``label(id, "deleted", False)`` takes it back."""
        self.label(id, DELETED, True, author=author)

    # -- reading ---------------------------------------------------------------------------------------------------

    def select(self, where: Selection = EVERYTHING) -> list[Entry]:
        """Catalog entries, oldest first, labels applied, deleted ones left out."""
        labels, _ = read_labels(self.path)
        selected = []
        for entry in self.entries():
            own = labels.get(entry.id, {})
            if own.get(DELETED):
                continue
            if SUCCESS in own:
                entry = dataclasses.replace(entry, success=bool(own[SUCCESS]))
            if where.matches(entry):
                selected.append(entry)
        return selected

    def entries(self) -> list[Entry]:
        """The catalog as it is: every committed episode, oldest first, labels not applied."""
        return self._try_catalog(Catalog.entries)

    def labels(self, id: str) -> dict[str, LabelValue]:
        return read_labels(self.path)[0].get(id, {})

    def read(self, id: str) -> Episode:
        """The episode, its raw arrays as views of a private memory map. Raises CorruptEpisode if the file is torn."""
        entry = self._entry(id)
        arrays = self.map(entry)
        _, attributes = read_directory(self.file(id))
        return unpack(arrays, attributes)

    def map(self, entry: Entry) -> Arrays:
        """The stored arrays of an episode, memory-mapped."""
        return map_arrays(self.file(entry.id), entry.layout, size=entry.bytes)

    def file(self, id: str) -> Path:
        return self.path / f"ep-{id}{_SUFFIX}"

    def close(self) -> None:
        self._catalog.close()

    def __enter__(self) -> EpisodeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _entry(self, id: str) -> Entry:
        entry = self._try_catalog(lambda catalog: catalog.entry(id))
        if entry is None:
            raise EpisodeError(f"{self.path}: no episode {id}")
        return entry

    # -- the catalog -----------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Write the catalog anew from the episode files."""
        with self._repair_lock():
            self._catalog.close()
            delete_catalog(self.path)
            self._catalog = self._open_catalog()

    def _open_catalog(self) -> Catalog:
        try:
            return self._reconciled(Catalog(self.path))
        except sqlite3.DatabaseError as error:
            return self._replacement(error)

    def _try_catalog(self, use: Callable[[Catalog], Any]) -> Any:
        try:
            return use(self._catalog)
        except sqlite3.DatabaseError as error:
            self._catalog.close()
            with self._repair_lock():
                self._catalog = self._replacement(error)
            return use(self._catalog)

    def _replacement(self, error: sqlite3.DatabaseError) -> Catalog:
        """A damaged catalog is rebuilt; where none can be written (full, read-only), one in memory serves as well."""
        if not isinstance(error, sqlite3.OperationalError):
            delete_catalog(self.path)
            return self._open_catalog()
        if error.sqlite_errorcode & 0xFF in _UNWRITABLE:
            return self._reconciled(Catalog(None))
        raise EpisodeError(f"{self.path}: the catalog cannot be used: {error}") from error

    def _reconciled(self, catalog: Catalog) -> Catalog:
        """Catalog what a killed writer had committed, forget what is gone, sweep what it left half-written."""
        catalogued, on_disk = catalog.ids(), set()
        for item in os.scandir(self.path):
            if item.name.startswith("ep-") and item.name.endswith(_SUFFIX):
                on_disk.add(item.name[3 : -len(_SUFFIX)])
            elif item.name.startswith(".ep-"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - item.stat().st_mtime > _STALE_S:
                        os.unlink(item.path)
        self.corrupt, found = {}, []
        for id in sorted(on_disk - catalogued):
            try:
                found.append(_scan(self.file(id)))
            except CorruptEpisode as error:
                self.corrupt[self.file(id).name] = str(error)
        if gone := catalogued - on_disk:
            catalog.remove(gone)
        if found:
            catalog.add(found)
        return catalog

    @contextlib.contextmanager
    def _repair_lock(self) -> Iterator[None]:
        """One process at a time opens or rebuilds: SQLite cannot switch to WAL or be deleted under another."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):  # a store that cannot be written needs no lock: its catalog is in memory
                lock = stack.enter_context(open(self.path / ".lock", "wb"))
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _scan(path: Path) -> Entry:
    """The catalog entry of a file, from the file alone. Raises CorruptEpisode."""
    layout, attributes = read_directory(path)
    if attributes.get("schema") != SCHEMA:
        raise corrupt(path, f"schema is {attributes.get('schema')!r}, this version reads {SCHEMA!r}")
    missing = set(ARRAYS) - set(layout) | set(ATTRIBUTES) - set(attributes)
    if missing:
        raise corrupt(path, f"without {', '.join(sorted(missing))}")
    size = path.stat().st_size
    success = map_arrays(path, {"success": layout["success"]}, size=size)["success"]
    return _entry(attributes, layout, success=bool(success.any()), size=size)


def _entry(attributes: dict[str, Any], layout: Layout, *, success: bool, size: int) -> Entry:
    words = {name: attributes[name] for name in _CATALOGUED}
    steps, looks = layout["action"][2][0], layout["state"][2][0]
    return Entry(**words, success=success, steps=steps, looks=looks, bytes=size, layout=layout)
