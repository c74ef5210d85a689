"""A folder of episodes that survives crashes.

    STORE/ep-<ulid>.zarr.zip   one immutable episode each, a zarr v3 group that any zarr reader opens
    STORE/catalog.sqlite       an index, rebuilt from the episode files when needed
    STORE/labels.jsonl         append-only labels, deletions and cuts

An episode is committed by renaming its file: it is written to a temporary file, synced and renamed, then the folder is
synced. A file with an episode's name is therefore always complete, even if the writer is killed at any point. Any
number of processes may write at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from episodes.archive import map_arrays, read_directory, verify_archive, write_archive
from episodes.catalog import CATALOG_NAME, Catalog, Entry, delete_catalog, make_entry, read_entry
from episodes.cuts import Part, cut, labels_of, parts_of
from episodes.files import locked, sync
from episodes.overlays import (
    DELETED,
    LABELS_NAME,
    SPLIT,
    TRIM,
    EpisodeOutcome,
    LabelChange,
    Labels,
    LabelValue,
    append_labels,
    is_success,
    outcome_of,
    read_history,
    read_labels,
    recorded_id,
    undo_labels,
)
from episodes.packing import Arrays, pack, recording_digest, unpack
from episodes.schema import ACTORS, HUMAN, CorruptEpisode, Episode, EpisodeError, StoreFull, validate
from sims.errors import is_disk_full

_PREFIX, _SUFFIX = "ep-", ".zarr.zip"
_FILES = f"{_PREFIX}*{_SUFFIX}"
LOCK_NAME = ".lock"
_STALE_S = 3600.0  # age at which the temporary file of a killed writer is deleted
_UNWRITABLE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """Which episodes: all conditions that are not None must hold."""

    tasks: tuple[str, ...] | None = None
    success: bool | None = None
    folds: tuple[int, ...] | None = None
    ids: frozenset[str] | None = None

    def matches(self, entry: Entry) -> bool:
        return (
            (self.tasks is None or entry.task in self.tasks)
            and (self.success is None or entry.success == self.success)
            and (self.folds is None or entry.fold in self.folds)
            and (self.ids is None or entry.id in self.ids)
        )


EVERYTHING = Selection()


class EpisodeStore:
    """``create`` makes it, in a folder that is missing or empty.

    Opening brings the catalog up to date with the folder, and rebuilds it if it is missing, damaged or of an older
    version. ``corrupt``: file name -> problem, of the files that could not be read.
    Raises EpisodeError if there is no such store, ``create`` meets a folder of other files, or the catalog cannot be
    opened.
    """

    def __init__(self, path: str | Path, *, create: bool = False):
        self.path = Path(path)
        self.corrupt: dict[str, str] = {}
        self._read_labels: tuple[tuple[int, int, int], Labels] | None = None  # version of their file, and they
        if self.path.is_file():
            raise EpisodeError(f"{self.path} is a file; an episode store is a folder")
        if create and not self.path.is_dir():
            self.path.mkdir(parents=True, exist_ok=True)
            sync(self.path.parent)
        if not self.path.is_dir():
            hint = f"vla-rl collect CONFIG --episodes N --out {self.path}"
            raise EpisodeError(f"{self.path}: no such episode store. Record one with: {hint}")
        if not is_store(self.path):
            without = f"{self.path} is not an episode store: it has no {_FILES} and no {CATALOG_NAME}"
            if not create:
                raise EpisodeError(without)
            others = sorted(file.name for file in self.path.iterdir() if not file.name.startswith("."))
            if others and not is_store(self.path):  # another process may have made it meanwhile
                raise EpisodeError(f"{without}, but {others[0]}; choose a new folder for the episodes")
        # Another process must not switch to WAL or delete the file meanwhile. Read-only, the catalog is in memory.
        with locked(self.path / LOCK_NAME):
            self._catalog = self._open_catalog()

    # -- writing ---------------------------------------------------------------------------------------------------

    def add(self, episode: Episode) -> str:
        """Commit one episode; durable when it returns. Returns its id. Raises InvalidEpisode, StoreFull."""
        return self.add_all([episode])[0]

    def add_all(self, episodes: Iterable[Episode]) -> list[str]:
        """As ``add`` for each, with one sync of the folder. If one is refused, those before it stay committed."""
        written: list[Entry] = []
        try:
            for episode in episodes:
                validate(episode)
                written.append(self._write(episode))
        finally:
            if written:
                sync(self.path)
                self._use_catalog(lambda catalog: catalog.add(written))
        return [entry.id for entry in written]

    def add_file(self, path: Path) -> str:
        """Commit an episode file of another store by moving it here, on the same disk; returns its id.

        If the episode is here already, ``path`` and the file here stay; but a damaged one here is replaced. Raises
        CorruptEpisode; then ``path`` stays.
        """
        verify_archive(path)
        entry = read_entry(path)
        file = self.file(entry.id)
        with contextlib.suppress(CorruptEpisode):  # missing or damaged
            verify_archive(file)
            return entry.id
        sync(path)
        os.rename(path, file)
        sync(self.path)
        self._use_catalog(lambda catalog: catalog.add([entry]))
        return entry.id

    def _write(self, episode: Episode) -> Entry:
        arrays, attributes = pack(episode)
        final, temporary = self.file(episode.id), self.path / f".ep-{episode.id}.tmp"
        if final.exists():
            raise EpisodeError(f"{final}: this episode is already in the store; episodes never change")
        try:
            with open(temporary, "xb", buffering=1 << 16) as file:
                locations = write_archive(file, arrays=arrays, attributes=attributes)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            os.rename(temporary, final)
        except BaseException as error:
            temporary.unlink(missing_ok=True)
            if isinstance(error, OSError) and is_disk_full(error):
                raise self._full(episode, arrays, error) from error
            raise
        return make_entry(attributes, locations, success=episode.succeeded, size=size)

    def _full(self, episode: Episode, arrays: Arrays, error: OSError) -> StoreFull:
        megabytes = sum(array.nbytes for array in arrays.values()) / 1e6
        return StoreFull(
            f"{self.path}: no space left for episode {episode.id} of {megabytes:.1f} MB: {error.strerror}. "
            "All episodes committed before are intact; free some space and continue"
        )

    def label(self, id: str, key: str, value: LabelValue | None, *, author: str) -> None:
        """Append a label; the episode's file does not change. ``select`` uses ``success`` and ``deleted``.

        EpisodeError for an unknown id.
        """
        self.label_together(id, {key: value}, author=author)

    def label_together(self, id: str, labels: Mapping[str, LabelValue | None], *, author: str) -> None:
        """As ``label`` for each, at one press: one ``undo`` takes all of them back."""
        self._lineage(id)
        append_labels(self.path, episode=id, labels=labels, author=author)

    def trim(self, id: str, first: int, end: int, *, author: str) -> None:
        """From now on only control steps ``first`` .. ``end - 1`` are read, by everything that reads this store.

        Steps are counted as ``read`` shows them now. Raises EpisodeError unless both were observed, and for an unknown
        id.
        """
        start = self._cuttable(id, first, end)
        self.label(id, TRIM, f"{start + first}-{start + end}", author=author)

    def split(self, id: str, at: int, *, author: str) -> tuple[str, str]:
        """From now on two episodes are read: the steps before ``at``, and those from ``at`` on. Returns their ids.

        Raises EpisodeError as ``trim`` does.
        """
        start = self._cuttable(id, 0, at, whole=False)
        self.label(id, SPLIT, start + at, author=author)
        before, after = (part.id for part in self._parts(id) if id in part.lineage)
        return before, after

    def _cuttable(self, id: str, first: int, end: int, *, whole: bool = True) -> int:
        """The recorded step that is step 0 of episode ``id``. Raises EpisodeError if it cannot be cut at these."""
        entry = self.entry(id)
        observed = {*self.map(entry)["observation_steps"].tolist(), *([entry.steps] if whole else [])}
        if not 0 <= first < end <= entry.steps or not {first, end} <= observed or (end == entry.steps and not whole):
            raise EpisodeError(
                f"episode {id} has {entry.steps} steps and cannot be cut at {first} and {end}: "
                "cuts are at steps at which it was observed, and leave some on both sides"
            )
        return entry.first

    def undo(self, id: str, *, author: str) -> LabelChange | None:
        """Take back the last label, deletion or cut of the episode that still holds, and all that was labelled with it.

        Returns the last of these, None if there is none. Where a part has none of its own, it is the last of what it
        was split from, in the end the split itself. EpisodeError for an unknown id.
        """
        undone = (undo_labels(self.path, episode=one, author=author) for one in reversed(self._lineage(id)))
        return next((change for change in undone if change is not None), None)

    def history(self, id: str) -> list[LabelChange]:
        """Every change of the labels of the episode, and of what it was split from; undone ones too, oldest first.

        EpisodeError for an unknown id.
        """
        return read_history(self.path, set(self._lineage(id)))

    def delete(self, id: str, *, author: str) -> None:
        """Exclude the episode from ``select``; its file stays. ``label(id, "deleted", False)`` restores it."""
        self.label(id, DELETED, True, author=author)

    # -- reading ---------------------------------------------------------------------------------------------------

    def select(self, where: Selection = EVERYTHING) -> list[Entry]:
        """Entries of the episodes that match, oldest first, with labels applied and without the deleted ones."""
        return [entry for entry, _ in self.select_labelled(where)]

    def select_labelled(self, where: Selection = EVERYTHING) -> list[tuple[Entry, dict[str, LabelValue]]]:
        """As ``select``, each with its labels."""
        selected = []
        for entry, labels in self.labelled():
            if labels.get(DELETED):
                continue
            if (success := is_success(labels, entry.success)) != entry.success:
                entry = dataclasses.replace(entry, success=success)
            if where.matches(entry):
                selected.append((entry, labels))
        return selected

    def labelled(self) -> list[tuple[Entry, dict[str, LabelValue]]]:
        """All episodes as they are read, trimmed and split, each with its labels; success as recorded."""
        labels = self._labels()
        return [
            (self._cut(entry, part), part.labels) for entry in self.entries() for part in self._parts_of(entry, labels)
        ]

    def entries(self) -> list[Entry]:
        """Entries of all committed episodes, oldest first, without labels applied."""
        return self._use_catalog(Catalog.entries)

    def entry(self, id: str) -> Entry:
        """Of one episode as it is read now, success as recorded. EpisodeError if there is none, or it is split."""
        within = [part for part in self._parts(id) if id in part.lineage]
        if not within:
            raise EpisodeError(f"{self.path}: no episode {id}")
        if within[0].id != id:
            names = ", ".join(part.id for part in within)
            raise EpisodeError(f"{self.path}: episode {id} is split; its parts are {names}")
        return self._cut(self._recorded(id), within[0])

    def labels(self, id: str) -> dict[str, LabelValue]:
        """Of the episode; of a part also those of what it was split from, where it has none of its own.

        EpisodeError for an unknown id.
        """
        return labels_of(self._lineage(id), self._labels())

    def outcome(self, id: str) -> EpisodeOutcome | None:
        """``outcome_of`` the whole recorded episode that ``id`` is, or is a part of.

        "unknown" also where all parts that it is split into are deleted. EpisodeError for an unknown id.
        """
        entry, labels = self._recorded(id), self._labels()
        deleted = all(part.labels.get(DELETED) for part in self._parts_of(entry, labels))
        return "unknown" if deleted else outcome_of(labels.get(entry.id, {}))

    def read(self, id: str) -> Episode:
        """The episode; its arrays are views of a private memory map. Raises CorruptEpisode if the file is damaged."""
        entry = self.entry(id)
        arrays = self.map(entry)
        self.verify([entry])
        _, attributes = read_directory(self.file(id))
        return unpack(arrays, attributes | {"id": id})

    def fingerprint(self, entry: Entry) -> dict[str, str]:
        """``Episode.fingerprint``, without reading the arrays. Raises CorruptEpisode where the file is damaged."""
        file = self.file(entry.id)
        try:
            _, attributes = read_directory(file)
            return dict(attributes["fingerprint"])
        except Exception:
            verify_archive(file)
            raise

    def recordings(self, entries: Iterable[Entry]) -> dict[str, bytes]:
        """Of each of these that is a person's, as recorded, the digest of states and actions: of copies the same.

        Damaged files are left out (``corrupt`` and ``verify`` name them).
        """
        found = {}
        for entry in entries:
            if entry.source == ACTORS[HUMAN]:
                with contextlib.suppress(CorruptEpisode):
                    found[entry.id] = recording_digest(self.map(entry))
        return found

    def map(self, entry: Entry) -> Arrays:
        """The stored arrays of an episode, memory-mapped. Raises CorruptEpisode if the file is missing or truncated."""
        arrays = map_arrays(self.file(entry.id), entry.locations, size=entry.bytes)
        return arrays if entry.span is None else cut(arrays, *entry.span)

    def verify(self, entries: Iterable[Entry]) -> None:
        """Compare the content of these episodes with its hash, about 1 GB per second. Raises CorruptEpisode."""
        for file in dict.fromkeys(self.file(entry.id) for entry in entries):
            verify_archive(file)

    def file(self, id: str) -> Path:
        """The file of an episode or of one of its parts."""
        return episode_file(self.path, id)

    def close(self) -> None:
        """Close the catalog; arrays that were read stay valid."""
        self._catalog.close()

    def __enter__(self) -> EpisodeStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _labels(self) -> Labels:
        """All labels, as long as the file is the one that was read last, which only ever grows, without reading it."""
        try:
            found = os.stat(self.path / LABELS_NAME)
        except FileNotFoundError:
            return {}
        version = (found.st_ino, found.st_size, found.st_mtime_ns)
        known = self._read_labels
        if known is None or known[0] != version:
            self._read_labels = known = version, read_labels(self.path)[0]  # what another thread reads may be older
        return known[1]

    def _recorded(self, id: str) -> Entry:
        entry = self._use_catalog(lambda catalog: catalog.entry(recorded_id(id)))
        if entry is None:
            raise EpisodeError(f"{self.path}: no episode {id}")
        return entry

    def _parts(self, id: str) -> list[Part]:
        """Everything that is read of the recorded episode that ``id`` is, or is a part of."""
        entry = self._recorded(id)
        return self._parts_of(entry, self._labels())

    def _parts_of(self, entry: Entry, labels: Labels) -> list[Part]:
        try:
            return list(parts_of(entry.id, entry.steps, labels))
        except EpisodeError as error:
            raise EpisodeError(f"{self.path / LABELS_NAME}: {error}") from error

    def _lineage(self, id: str) -> tuple[str, ...]:
        """The ids from the recorded episode's to ``id``."""
        for part in self._parts(id):
            if id in part.lineage:
                return part.lineage[: part.lineage.index(id) + 1]
        raise EpisodeError(f"{self.path}: no episode {id}")

    def _cut(self, entry: Entry, part: Part) -> Entry:
        if (part.first, part.end) == (0, entry.steps):
            return entry
        observations = entry.observations
        with contextlib.suppress(CorruptEpisode):  # whoever reads the file is told
            name = "observation_steps"
            observed = map_arrays(self.file(entry.id), {name: entry.locations[name]}, size=entry.bytes)[name]
            observations = int(((observed >= part.first) & (observed <= part.end)).sum())
        return dataclasses.replace(
            entry,
            id=part.id,
            span=(part.first, part.end),
            steps=part.end - part.first,
            observations=observations,
            ends_as_labelled=part.ends_as_labelled,
        )

    # -- the catalog -----------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Write the catalog again from the episode files; stores that are open meanwhile see the new one."""
        with locked(self.path / LOCK_NAME):
            try:
                self._synchronized(self._catalog, anew=True)
            except sqlite3.DatabaseError as error:
                self._catalog.close()
                self._catalog = self._replace_catalog(error)

    def _open_catalog(self) -> Catalog:
        try:
            return self._synchronized(Catalog(self.path))
        except sqlite3.DatabaseError as error:
            return self._replace_catalog(error)

    def _use_catalog(self, use: Callable[[Catalog], Any]) -> Any:
        try:
            return use(self._catalog)
        except sqlite3.DatabaseError as error:
            self._catalog.close()
            with locked(self.path / LOCK_NAME):
                self._catalog = self._replace_catalog(error)
            return use(self._catalog)

    def _replace_catalog(self, error: sqlite3.DatabaseError) -> Catalog:
        """Rebuild a damaged or outdated catalog; use one in memory if none can be written (disk full, read-only)."""
        if not isinstance(error, sqlite3.OperationalError):
            delete_catalog(self.path)
            return self._open_catalog()
        if error.sqlite_errorcode & 0xFF in _UNWRITABLE:
            return self._synchronized(Catalog(None))
        raise EpisodeError(f"{self.path}: the catalog cannot be used: {error}") from error

    def _synchronized(self, catalog: Catalog, *, anew: bool = False) -> Catalog:
        """Add files that are not in the catalog, remove missing ones, delete temporary files of killed writers.

        ``anew``: read the files that are in it again, too.
        """
        known, on_disk = catalog.ids(), set()
        for item in os.scandir(self.path):
            if item.name.startswith(_PREFIX) and item.name.endswith(_SUFFIX):
                on_disk.add(_id_of(item.name))
            elif item.name.startswith(".ep-"):
                with contextlib.suppress(FileNotFoundError):
                    if time.time() - item.stat().st_mtime > _STALE_S:
                        os.unlink(item.path)
        self.corrupt, found = {}, []
        for id in sorted(on_disk if anew else on_disk - known):
            try:
                found.append(read_entry(self.file(id)))
            except CorruptEpisode as error:
                self.corrupt[self.file(id).name] = str(error)
        outdated = known if anew else known - on_disk
        if outdated or found:
            catalog.replace(outdated, found)
        return catalog


def select_among(stores: Sequence[EpisodeStore]) -> list[tuple[EpisodeStore, Entry, dict[str, LabelValue]]]:
    """Every episode of these stores with its labels; one that several of them hold once, as in the first."""
    found: dict[str, tuple[EpisodeStore, Entry, dict[str, LabelValue]]] = {}
    for store in stores:
        for entry, labels in store.select_labelled():
            found.setdefault(entry.id, (store, entry, labels))
    return list(found.values())


def is_store(path: Path) -> bool:
    """Whether the folder ``path`` has episodes or an index of them."""
    return (path / CATALOG_NAME).exists() or any(path.glob(_FILES))


def episode_file(folder: Path, id: str) -> Path:
    """Of an episode, or of one of its parts, in the store ``folder``."""
    return folder / f"{_PREFIX}{recorded_id(id)}{_SUFFIX}"


def episode_ids(folder: Path) -> list[str]:
    """Of the episode files in ``folder``, without opening the store; none where there is no such folder."""
    return [_id_of(file.name) for file in folder.glob(_FILES)]


def _id_of(name: str) -> str:
    return name[len(_PREFIX) : -len(_SUFFIX)]
