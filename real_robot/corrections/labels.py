"""What a person does to an episode's labels at one press, which one Undo takes back."""

from __future__ import annotations

from collections.abc import Mapping

from episodes.overlays import LabelChange, LabelValue, append_labels
from episodes.store import EpisodeStore


def label_together(store: EpisodeStore, id: str, labels: Mapping[str, LabelValue | None], *, author: str) -> None:
    """Of an episode that is in ``store``; None takes a label away. Raises StoreFull."""
    append_labels(store.path, episode=id, labels=labels, author=author)


def undo_together(store: EpisodeStore, id: str, *, author: str) -> LabelChange | None:
    """Take back what was done last and still holds, and all that was done with it; the last of these, None if nothing.

    EpisodeError for an unknown id.
    """
    history = store.history(id)
    last = store.undo(id, author=author)
    if last is not None:
        together = [one for one in history if one.undoes is None and _press(one) == _press(last)]
        for _ in together[1:]:
            store.undo(id, author=author)
    return last


def _press(change: LabelChange) -> tuple[str, str, float]:
    return change.episode, change.author, change.time_s
