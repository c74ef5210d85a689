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
import io
import json
import os
import sqlite3
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from episodes.archive import Layout, corrupt, map_arrays, read_directory, verify_archive, write_archive
from episodes.catalog import Catalog, Entry, delete_catalog
from episodes.overlays import DELETED, SUCCESS, LabelValue, append_label, read_labels
from episodes.schema import ARRAYS, SCHEMA, CorruptEpisode, Episode, EpisodeError, StoreFull, validate

_SUFFIX = ".zarr.zip"
_STALE_S = 3600.0
_ATTRIBUTES = tuple(
    f.name for f in dataclasses.fields(Episode) if f.name not in ARRAYS and f.name not in ("images", "fingerprint")
)
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
        if create:
            self.path.mkdir(parents=True, exist_ok=True)
        if not self.path.is_dir():
            raise EpisodeError(f"{self.path}: no such episode store. Record one with: vla-rl collect CONFIG --out STORE")
        with self._repair_lock():
            self._catalog = self._open_catalog()

    # -- writing ---------------------------------------------------------------------------------------------------

    def add(self, episode: Episode) -> str:
        """Commit one episode; durable when it returns. Returns its id. Raises InvalidEpisode, StoreFull."""
        return self.add_all([episode])[0]

    def add_all(self, episodes: Iterable[Episode]) -> list[str]:
        """As ``add`` for each, syncing folder and catalog once. If one is refused, those before it stay committed."""
        entries: list[Entry] = []
        try:
            for episode in episodes:
                validate(episode)
                entries.append(self._write(episode))  # noqa: PERF401  (those written must survive an error)
        finally:
            if entries:
                _sync_folder(self.path)
                self._try_catalog(lambda catalog: catalog.add(entries))
        return [entry.id for entry in entries]

    def _write(self, episode: Episode) -> Entry:
        arrays, attributes = _pack(episode, self._jpeg_quality)
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
                raise StoreFull(
                    f"{self.path}: no space left for episode {episode.id} ({_nbytes(arrays) / 1e6:.1f} MB): "
                    f"{error.strerror}. All episodes committed before are intact; free some space and go on"
                ) from error
            raise
        return _entry(attributes, layout, success=episode.succeeded, size=size)

    def label(self, id: str, key: str, value: LabelValue, *, author: str) -> None:
        """Append a label; the episode's file stays as it is. ``success`` and ``deleted`` change what ``select`` gives."""
        self._catalog.entry(id)
        append_label(self.path, episode=id, key=key, value=value, author=author)

    def delete(self, id: str, *, author: str) -> None:
        """A tombstone: the episode is no longer selected. ``label(id, "deleted", False)`` takes it back."""
        self.label(id, DELETED, True, author=author)

    # -- reading ---------------------------------------------------------------------------------------------------

    def select(self, where: Selection = EVERYTHING) -> list[Entry]:
        """Catalog entries, oldest first, labels applied, deleted ones left out."""
        labels, _ = read_labels(self.path)
        selected = []
        for entry in self._try_catalog(Catalog.entries):
            own = labels.get(entry.id, {})
            if own.get(DELETED):
                continue
            if SUCCESS in own:
                entry = dataclasses.replace(entry, success=bool(own[SUCCESS]))
            if where.matches(entry):
                selected.append(entry)
        return selected

    def labels(self, id: str) -> dict[str, LabelValue]:
        return read_labels(self.path)[0].get(id, {})

    def read(self, id: str) -> Episode:
        """The episode, its raw arrays as views of a private memory map. Raises CorruptEpisode if the file is torn."""
        entry = self._catalog.entry(id)
        arrays = self.map(entry)
        _, attributes = read_directory(self.file(id))
        return _unpack(arrays, attributes)

    def map(self, entry: Entry) -> dict[str, np.ndarray]:
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

    # -- the catalog -----------------------------------------------------------------------------------------------

    def rebuild(self) -> None:
        """Write the catalog anew from the files."""
        with self._repair_lock():
            self._catalog.close()
            delete_catalog(self.path)
            self._catalog = self._open_catalog()

    def _open_catalog(self) -> Catalog:
        try:
            catalog = Catalog(self.path)
            self._reconcile(catalog)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):  # locked, read-only, full: the file itself is fine
                raise EpisodeError(f"{self.path}: cannot open the catalog: {error}") from error
            delete_catalog(self.path)
            catalog = Catalog(self.path)
            self._reconcile(catalog)
        return catalog

    def _reconcile(self, catalog: Catalog) -> None:
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
        if found or catalogued - on_disk:
            catalog.replace(removed=catalogued - on_disk, added=found)

    def _try_catalog(self, use: Callable[[Catalog], Any]) -> Any:
        try:
            return use(self._catalog)
        except sqlite3.DatabaseError as error:
            if isinstance(error, sqlite3.OperationalError):
                raise EpisodeError(f"{self.path}: the catalog cannot be used: {error}") from error
            self.rebuild()
            return use(self._catalog)

    @contextlib.contextmanager
    def _repair_lock(self) -> Iterator[None]:
        """One process at a time opens or rebuilds: SQLite cannot switch to WAL, nor be deleted, under another's feet."""
        with open(self.path / ".lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _nbytes(arrays: dict[str, np.ndarray]) -> int:
    return sum(array.nbytes for array in arrays.values())


def _pack(episode: Episode, jpeg_quality: int | None) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays = {name: getattr(episode, name) for name in ARRAYS}
    for camera, frames in episode.images.items():
        if jpeg_quality is None:
            arrays[f"images/{camera}"] = frames
        else:
            arrays[f"jpeg/{camera}/blob"], arrays[f"jpeg/{camera}/offsets"] = encode_jpeg(frames, jpeg_quality)
    attributes = {name: getattr(episode, name) for name in _ATTRIBUTES}
    attributes |= {"schema": SCHEMA, "seed": int(episode.seed), "fingerprint": dict(episode.fingerprint)}
    return arrays, attributes


def _unpack(arrays: dict[str, np.ndarray], attributes: dict[str, Any]) -> Episode:
    images = {name.removeprefix("images/"): frames for name, frames in arrays.items() if name.startswith("images/")}
    for camera in [name.split("/")[1] for name in arrays if name.startswith("jpeg/") and name.endswith("/blob")]:
        blob, offsets = arrays[f"jpeg/{camera}/blob"], arrays[f"jpeg/{camera}/offsets"]
        images[camera] = np.stack([decode_jpeg(blob, offsets, look) for look in range(len(offsets) - 1)])
    return Episode(
        images=images,
        fingerprint=attributes["fingerprint"],
        **{name: attributes[name] for name in _ATTRIBUTES},
        **{name: arrays[name] for name in ARRAYS},
    )


def encode_jpeg(frames: np.ndarray, quality: int) -> tuple[np.ndarray, np.ndarray]:
    """[L, h, w, 3] -> all JPEG files end to end [bytes] uint8, and where each begins [L + 1] int64."""
    from PIL import Image

    blob, offsets = io.BytesIO(), [0]
    for frame in frames:
        Image.fromarray(frame).save(blob, format="JPEG", quality=quality, subsampling=0)
        offsets.append(blob.tell())
    return np.frombuffer(blob.getvalue(), dtype=np.uint8), np.asarray(offsets, dtype=np.int64)


def decode_jpeg(blob: np.ndarray, offsets: np.ndarray, look: int) -> np.ndarray:
    """Frame ``look`` of ``encode_jpeg``'s output, [h, w, 3] uint8."""
    from PIL import Image

    return np.asarray(Image.open(io.BytesIO(blob[offsets[look] : offsets[look + 1]])))


def _scan(path: Path) -> Entry:
    """The catalog entry of a file, from the file alone. Raises CorruptEpisode."""
    layout, attributes = read_directory(path)
    if attributes.get("schema") != SCHEMA:
        raise corrupt(path, f"schema is {attributes.get('schema')!r}, this version reads {SCHEMA!r}")
    missing = set(ARRAYS) - set(layout) | set(_ATTRIBUTES) - set(attributes)
    if missing:
        raise corrupt(path, f"without {', '.join(sorted(missing))}")
    size = path.stat().st_size
    success = map_arrays(path, {"success": layout["success"]}, size=size)["success"]
    return _entry(attributes, layout, success=bool(success.any()), size=size)


def _entry(attributes: dict[str, Any], layout: Layout, *, success: bool, size: int) -> Entry:
    words = {name: attributes[name] for name in ("id", "task", "instruction", "source", "split", "seed", "policy_version")}
    steps, looks = layout["action"][2][0], layout["state"][2][0]
    return Entry(**words, success=success, steps=steps, looks=looks, bytes=size, layout=layout)


# -- vla-rl data ---------------------------------------------------------------------------------------------------


def info(path: str | Path) -> dict[str, Any]:
    """``vla-rl data info``: counts, and files that are unreadable or of the wrong size (``verify`` reads every byte)."""
    with EpisodeStore(path) as store:
        return _summary(store, store.select(), unreadable=[*store.corrupt, *_wrong_size(store)])


def verify(path: str | Path) -> dict[str, Any]:
    """``vla-rl data verify``: as ``info``, after comparing every byte of every file with its hash. Changes nothing."""
    with EpisodeStore(path) as store:
        bad = dict(store.corrupt)
        for entry in store._try_catalog(Catalog.entries):
            try:
                verify_archive(store.file(entry.id))
            except (CorruptEpisode, FileNotFoundError) as error:
                bad[store.file(entry.id).name] = str(error)
        return _summary(store, store.select(), unreadable=list(bad))


def rebuild(path: str | Path) -> dict[str, Any]:
    """``vla-rl data rebuild``: the catalog written anew from the files, then ``info``."""
    with EpisodeStore(path) as store:
        store.rebuild()
    return info(path)


def _wrong_size(store: EpisodeStore) -> list[str]:
    files = [(store.file(entry.id), entry.bytes) for entry in store._try_catalog(Catalog.entries)]
    return [file.name for file, size in files if not file.exists() or file.stat().st_size != size]


def _summary(store: EpisodeStore, entries: Sequence[Entry], *, unreadable: Sequence[str]) -> dict[str, Any]:
    def count(name: str) -> dict[str, int]:
        values = [str(getattr(entry, name)) for entry in entries]
        return {value: values.count(value) for value in sorted(set(values))}

    return {
        "path": str(store.path),
        "episodes": len(entries),
        "steps": sum(entry.steps for entry in entries),
        "looks": sum(entry.looks for entry in entries),
        "bytes": sum(entry.bytes for entry in entries),
        "successes": sum(entry.success for entry in entries),
        "tasks": count("task"),
        "sources": count("source"),
        "splits": count("split"),
        "corrupt": sorted(unreadable),
    }
