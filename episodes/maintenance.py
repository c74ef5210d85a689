"""The functions behind ``vla-rl data info``, ``verify``, ``rebuild``, ``merge`` and ``compact``.

Each returns {path, episodes, steps, observations, bytes, successes, tasks, sources, splits, corrupt} for JSON; files
that are named in ``corrupt`` are not counted.
"""

from __future__ import annotations

import contextlib
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from episodes.archive import verify_archive
from episodes.catalog import Entry, delete_catalog
from episodes.cuts import parts_of
from episodes.files import locked, sync
from episodes.layout import layout_of, store_layout
from episodes.overlays import (
    DELETED,
    LABELS_NAME,
    RECORDING,
    Labels,
    append_changes,
    append_labels,
    labels_locked,
    labels_with,
    read_changes,
    read_labels,
)
from episodes.schema import CorruptEpisode, EpisodeError, StoreFull, new_ulid
from episodes.store import LOCK_NAME, EpisodeStore, episode_ids, is_store
from sims.errors import is_disk_full

_FILL_LOCK_NAME = ".fill_lock"


def info(path: str | Path) -> dict[str, Any]:
    """Counts, and the files that are unreadable or of the wrong size. ``verify`` also checks their content."""
    with EpisodeStore(path) as store:
        return _summary(store, _unusable(store))


def verify(path: str | Path) -> dict[str, Any]:
    """As ``info``, after comparing the content of every file with its hash. Changes nothing."""
    with EpisodeStore(path) as store:
        return _summary(store, {*store.corrupt, *_altered(store, store.entries())})


def rebuild(path: str | Path) -> dict[str, Any]:
    """Write the catalog again from the episode files, then ``info``."""
    with EpisodeStore(path) as store:
        store.rebuild()
    return info(path)


@contextlib.contextmanager
def store_to_fill(path: str | Path) -> Iterator[EpisodeStore]:
    """The store ``path``, made where there is none; if what fills it fails before an episode is in it, none remains.

    A folder that was there before stays, as it was. Waits as long as another process fills the store, so that both do
    not bring the same recordings.
    """
    path = Path(path)
    made = [folder for folder in (path, *path.parents) if not folder.exists()]
    there = path.is_dir() and is_store(path)
    EpisodeStore(path, create=True).close()  # refuses a folder of other files
    # Opened again: who had the lock may have removed the store, or was killed before its episodes were in the catalog.
    waiting = f"{path}: another process adds episodes; this one waits for it"
    with locked(path / _FILL_LOCK_NAME, waiting=waiting), EpisodeStore(path, create=True) as store:
        try:
            yield store
        except BaseException:
            if not there and not episode_ids(path):
                store.close()
                delete_catalog(path)
                for name in (LABELS_NAME, LOCK_NAME, _FILL_LOCK_NAME):
                    (path / name).unlink(missing_ok=True)
                with contextlib.suppress(OSError):  # another process has made something in it
                    for folder in made:
                        folder.rmdir()
            raise


def merge(path: str | Path, source: str | Path) -> dict[str, Any]:
    """Copy the episodes and labels of the store ``source`` that are not here yet, then ``info`` with ``copied``.

    The labels come first, so that no episode is read here without its own, even if the merge is ended before its end.
    Where both stores label one, the later label counts. An episode that was deleted here before and is not restored by
    a later label of ``source`` is not copied again; one that is deleted in ``source`` alone is, and can be restored.
    ``present``: how many are here under another id, recordings of people that both stores imported; these are not
    copied, and what ``source`` says of them does not count.
    A file here that ``verify`` calls corrupt is replaced by that of ``source``, and named in ``replaced``: those that
    both have are compared with their hashes, about 1 GB per second. Ended at any moment and started again, it
    continues, but for what is deleted in ``source``; started while another runs, it waits. ``corrupt`` also names files
    of ``source`` that are damaged, which are not copied. Raises StoreFull, and EpisodeError before anything is copied
    if an episode of ``source`` has other cameras, image sizes, dimensions or control rates than those that are here.
    """
    damaged, copied = set(), set()
    with EpisodeStore(source) as other, store_to_fill(path) as store:
        if store.path.resolve() == other.path.resolve():
            raise EpisodeError(f"{path} cannot be merged into itself")
        theirs = other.entries()
        there_too = {entry.id for entry in theirs}
        both = (entry for entry in store.entries() if entry.id in there_too)
        unusable = {*_unusable(store), *_altered(store, both)}
        present = {entry.id for entry in store.entries() if store.file(entry.id).name not in unusable}
        damaged |= {str(other.path / name) for name in other.corrupt}
        own = (entry for entry in store.entries() if entry.id in present)
        here, there = {digest.hex() for digest in store.recordings(own).values()}, other.recordings(theirs)
        changes = read_changes(other.path)
        before, after = read_labels(store.path)[0], labels_with(store.path, changes)
        gone = {entry.id for entry in theirs if _deleted(entry, before) and _deleted(entry, after)}
        new = [entry for entry in theirs if entry.id not in present and entry.id not in gone]
        coming = {entry.id for entry in new}  # also what was removed here and is restored there
        here |= {str(of[RECORDING]) for id, of in before.items() if RECORDING in of and id not in coming}
        missing = [entry for entry in new if entry.id not in there or there[entry.id].hex() not in here]
        _check_layouts(store, other, [entry for entry in missing if not _deleted(entry, after)])
        append_changes(store.path, changes)
        for entry in missing:
            try:
                _copy(other.file(entry.id), store)
                copied.add(other.file(entry.id).name)
            except CorruptEpisode:
                damaged.add(str(other.file(entry.id)))
    result = info(path)
    corrupt, replaced = {*result["corrupt"], *damaged, *(unusable - copied)}, unusable & copied
    return result | {
        "corrupt": sorted(corrupt), "copied": len(copied), "present": len(new) - len(missing),
        "replaced": sorted(replaced),
    }  # fmt: skip


def _check_layouts(store: EpisodeStore, other: EpisodeStore, missing: Sequence[Entry]) -> None:
    """EpisodeError unless the ``missing`` episodes of ``other`` are alike, and like those here."""
    here = store_layout(store)
    for entry in missing:
        with contextlib.suppress(CorruptEpisode):  # named by ``merge``
            there = layout_of(other, entry)
            here = here or there
            if there != here:
                raise EpisodeError(
                    f"{other.file(entry.id)} has {there}, but the other episodes have {here}: nothing was copied; "
                    "merge it into a store of its own, or delete there what does not fit"
                )


def _deleted(entry: Entry, labels: Labels) -> bool:
    """Whether the recorded episode is, or all parts that it is split into are."""
    return all(part.labels.get(DELETED) for part in parts_of(entry.id, entry.steps, labels))


def _copy(file: Path, store: EpisodeStore) -> None:
    temporary = store.path / f".ep-{new_ulid()}.tmp"  # which the store deletes if this process is killed
    try:
        shutil.copyfile(file, temporary)
        store.add_file(temporary)
    except OSError as error:
        if is_disk_full(error):
            raise StoreFull(
                f"{store.path}: no space left for {file}: {error.strerror}. All episodes committed before are intact; "
                "free some space and merge again"
            ) from error
        raise
    finally:
        temporary.unlink(missing_ok=True)


def compact(path: str | Path) -> dict[str, Any]:
    """Remove the files of episodes that are deleted, all parts of them, for good; then ``info`` with ``removed`` and
    ``freed`` bytes. Labels stay, and people's recordings get one, so that ``merge`` does not bring the episodes back,
    from a store that imported the same recording neither. One that is restored before its file goes stays."""
    gone: dict[Path, int] = {}
    with EpisodeStore(path) as store:
        if deleted := _deleted_entries(store):
            for id, digest in store.recordings(deleted).items():
                append_labels(store.path, episode=id, labels={RECORDING: digest.hex()}, author="data compact")
            with labels_locked(store.path):  # nobody restores one meanwhile
                still = {entry.id for entry in _deleted_entries(store)}
                gone = {store.file(entry.id): entry.bytes for entry in deleted if entry.id in still}
                for file in gone:
                    file.unlink(missing_ok=True)  # another one compacts it too
        sync(store.path)
    return info(path) | {"removed": len(gone), "freed": sum(gone.values())}


def _deleted_entries(store: EpisodeStore) -> list[Entry]:
    """The recorded episodes that are deleted, all parts of them."""
    read = {store.file(entry.id) for entry, labels in store.labelled() if not labels.get(DELETED)}
    return [entry for entry in store.entries() if store.file(entry.id) not in read]


def _unusable(store: EpisodeStore) -> set[str]:
    """Names of the files that are unreadable, missing or of the wrong size."""
    wrong = {
        store.file(entry.id).name
        for entry in store.entries()
        if not store.file(entry.id).exists() or store.file(entry.id).stat().st_size != entry.bytes
    }
    return {*store.corrupt, *wrong}


def _altered(store: EpisodeStore, entries: Iterable[Entry]) -> set[str]:
    """Names of the files of these whose content does not match its hash, or that are missing."""
    altered = set()
    for file in (store.file(entry.id) for entry in entries):
        try:
            verify_archive(file)
        except CorruptEpisode:
            altered.add(file.name)
    return altered


def _summary(store: EpisodeStore, corrupt: set[str]) -> dict[str, Any]:
    entries = [entry for entry in store.select() if store.file(entry.id).name not in corrupt]
    return {
        "path": str(store.path),
        "episodes": len(entries),
        "steps": sum(entry.steps for entry in entries),
        "observations": sum(entry.observations for entry in entries),
        "bytes": sum({store.file(entry.id): entry.bytes for entry in entries}.values()),
        "successes": sum(entry.success for entry in entries),
        "tasks": dict(Counter(entry.task for entry in entries)),
        "sources": dict(Counter(entry.source for entry in entries)),
        "splits": dict(Counter(entry.split for entry in entries)),
        "corrupt": sorted(corrupt),
    }
