"""What a person does to an episode's labels at one press, which one Undo takes back."""

from __future__ import annotations

from collections.abc import Mapping

from episodes.overlays import LabelValue, append_labels
from episodes.store import EpisodeStore


def label_together(store: EpisodeStore, id: str, labels: Mapping[str, LabelValue | None], *, author: str) -> None:
    """Of an episode that is in ``store``; None takes a label away. Raises StoreFull."""
    append_labels(store.path, episode=id, labels=labels, author=author)
