"""Writes an episode store in the formats of other projects (``vla-rl data export``)."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from episodes.catalog import Entry
from episodes.formats.export_format import ExportFormat
from episodes.formats.mcap import export_mcap
from episodes.formats.to_lerobot import write_lerobot
from episodes.formats.to_robomimic import write_robomimic
from episodes.layout import Layout, episode_layout
from episodes.outcomes.rewards import rewarded
from episodes.schema import Episode, EpisodeError
from episodes.store import EpisodeStore

WRITERS: dict[ExportFormat, Callable[[Iterator[Episode], Path], object]] = {
    "lerobot": lambda episodes, path: write_lerobot(_alike(episodes), path),
    "lerobot-images": lambda episodes, path: write_lerobot(_alike(episodes), path, video=False),
    "robomimic": lambda episodes, path: write_robomimic(_alike(episodes), path),
    "mcap": export_mcap,
}


def export_episodes(store: EpisodeStore, path: Path, format: ExportFormat) -> dict[str, Any]:
    """Every episode of ``store``, oldest first, with its labels; returns {episodes, steps}.

    Raises EpisodeError where ``path`` exists and, but for mcap, where an episode was not observed at every control
    step or episodes differ in rate, cameras, image sizes or dimensions. ``path`` and its parents are made when all
    is written.
    """
    entries = store.select()
    if not entries:
        raise EpisodeError(f"{store.path} holds no episode to export")
    if path.exists():
        raise EpisodeError(f"{path} exists; choose another --out")
    existing = next(parent for parent in path.absolute().parents if parent.exists())
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=existing) as folder:
        unfinished = Path(folder) / path.name
        WRITERS[format]((_exported(store, entry) for entry in entries), unfinished)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.rename(path)
    return {"episodes": len(entries), "steps": sum(entry.steps for entry in entries)}


def _exported(store: EpisodeStore, entry: Entry) -> Episode:
    """As it is labelled now; of a success whose step of success was cut off, the last step is one.

    These formats tell an episode's success by its steps alone. Not so of the earlier parts of a split success.
    """
    episode = rewarded(store, entry)
    if not entry.success or episode.succeeded or not entry.ends_as_labelled:
        return episode
    last = np.arange(episode.num_steps) == episode.num_steps - 1
    return replace(
        episode,
        reward=episode.reward if episode.reward.any() else last.astype(np.float32),
        terminated=last,
        truncated=np.zeros_like(last),
        success=last,
    )


def _alike(episodes: Iterable[Episode]) -> Iterator[Episode]:
    expected: Layout | None = None
    for episode in episodes:
        steps = episode.num_steps
        if not np.array_equal(episode.observation_steps[:steps], np.arange(steps)):
            raise EpisodeError(
                f"episode {episode.id} ({episode.task}) was not observed at every control step, which this format "
                "needs; record with --start.observe_every 1, or export to mcap"
            )
        found = episode_layout(episode)
        expected = expected or found
        if found != expected:
            raise EpisodeError(f"episode {episode.id} has {found}, the first {expected}; export stores of one robot")
        yield episode
