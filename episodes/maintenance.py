"""The functions behind ``vla-rl data info``, ``verify`` and ``rebuild``.

Each returns {path, episodes, steps, observations, bytes, successes, tasks, sources, splits, corrupt} for JSON.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from episodes.archive import verify_archive
from episodes.schema import CorruptEpisode
from episodes.store import EpisodeStore


def info(path: str | Path) -> dict[str, Any]:
    """Counts, and the files that are unreadable or of the wrong size. ``verify`` also checks their content."""
    with EpisodeStore(path) as store:
        wrong = [
            store.file(entry.id).name
            for entry in store.entries()
            if not store.file(entry.id).exists() or store.file(entry.id).stat().st_size != entry.bytes
        ]
        return _summary(store, {*store.corrupt, *wrong})


def verify(path: str | Path) -> dict[str, Any]:
    """As ``info``, after comparing the content of every file with its hash. Changes nothing."""
    with EpisodeStore(path) as store:
        altered = set()
        for entry in store.entries():
            try:
                verify_archive(store.file(entry.id))
            except CorruptEpisode:
                altered.add(store.file(entry.id).name)
        return _summary(store, {*store.corrupt, *altered})


def rebuild(path: str | Path) -> dict[str, Any]:
    """Delete the catalog and write it again from the episode files, then ``info``."""
    with EpisodeStore(path) as store:
        store.rebuild()
    return info(path)


def _summary(store: EpisodeStore, corrupt: set[str]) -> dict[str, Any]:
    entries = store.select()
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
