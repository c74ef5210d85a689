"""Which of the parts of a split episode ends as the episode did whose success was labelled."""

from __future__ import annotations

from itertools import zip_longest

from episodes.catalog import Entry
from episodes.cuts import parts_of
from episodes.overlays import SUCCESS, read_labels, recorded_id
from episodes.store import EpisodeStore


def ends_as_labelled(store: EpisodeStore, entry: Entry) -> bool:
    """Whether the end of ``entry`` is that of the episode whose success was labelled.

    It is not where that episode was split, and ``entry`` is one of its earlier parts.
    """
    recorded = recorded_id(entry.id)
    if entry.id == recorded:
        return True
    labels, _ = read_labels(store.path)
    steps = next(whole.steps for whole in store.entries() if whole.id == recorded)
    parts = list(parts_of(recorded, steps, labels))
    part, following = next(pair for pair in zip_longest(parts, parts[1:]) if pair[0].id == entry.id)
    labelled = next((id for id in reversed(part.lineage) if SUCCESS in labels.get(id, {})), None)
    return following is None or labelled not in following.lineage
