"""The episodes of a store as the page shows them: a filtered list, one episode's curves, its frames and its labels."""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from episodes.catalog import Entry
from episodes.overlays import ABORT, DELETED, OUTCOME, SPLIT, SUCCESS, SUCCESS_FROM, OutcomeLabel, is_success
from episodes.packing import frame, frame_sizes
from episodes.schema import ACTORS, HUMAN, CorruptEpisode, EpisodeError
from episodes.store import EpisodeStore
from real_robot.corrections.attempt import actor_letters
from real_robot.corrections.frames import encode_jpeg

PAGE = 50  # episodes
Outcome = Literal["any", "success", "failure"]
Who = Literal["any", "corrected", "alone"]


class NotFound(ValueError):
    """There is no such episode, camera or frame."""


class CutMeanwhile(ValueError):
    """Somebody has cut the episode since it was shown: its steps are counted from another one."""


@dataclass(frozen=True, kw_only=True)
class Filter:
    """``task`` ""; any. ``who`` "corrected": a person drove in some steps. ``deleted``: only the deleted ones."""

    task: str = ""
    outcome: Outcome = "any"
    who: Who = "any"
    deleted: bool = False


class EpisodeBrowser:
    """Opens the store for each answer, so that episodes of other processes appear. Thread-safe.

    ``shown``: the recorded steps FIRST-END that a person sees, to whom a step is of these. CutMeanwhile if the episode
    has others now.
    """

    def __init__(self, path: Path, *, jpeg_quality: int) -> None:
        self._path, self._quality = path, jpeg_quality
        self._changing = threading.Lock()
        self._persons: dict[tuple[str, tuple[int, int] | None], tuple[float, int]] = {}  # by id and span

    def list(self, wanted: Filter, *, first: int = 0) -> dict[str, Any]:
        """{total, tasks, episodes: [...]}, newest first, ``PAGE`` at most."""
        rows = self.rows()
        chosen = [row for row in rows if _matches(row, wanted)]
        tasks = sorted({row["task"] for row in rows})
        return {"total": len(chosen), "tasks": tasks, "episodes": chosen[max(0, first) :][:PAGE]}

    def rows(self) -> Sequence[dict[str, Any]]:
        """All episodes, newest first; ``damaged``: the file cannot be read, and nobody knows who drove."""
        with EpisodeStore(self._path) as store:
            return [self._row(store, entry, labels) for entry, labels in reversed(store.labelled())]

    def read(self, id: str) -> dict[str, Any]:
        """One episode: its row, every step's actor, action and proposal, its labels and their history."""
        with EpisodeStore(self._path) as store:
            entry, labels = self._find(store, id)
            arrays = store.map(entry)
            action, shadow = arrays["action"], arrays.get("shadow_action")
            return {
                **self._row(store, entry, labels),
                "control_hz": store.read(id).control_hz,
                "actors": actor_letters(arrays["actor"].tolist()),
                "actor_names": list(ACTORS),
                "observation_steps": arrays["observation_steps"].tolist(),
                "action": np.round(action, 3).tolist(),
                "disagreement": [] if shadow is None else np.round(np.abs(action - shadow).max(1), 2).tolist(),
                "intervention": arrays["intervention"].tolist() if "intervention" in arrays else [],
                "operators": list(store.read(id).operators),
                "cameras": list(frame_sizes(arrays)),
                "history": [vars(change) for change in store.history(id)],
            }

    def frame(self, id: str, camera: str, index: int) -> bytes:
        """JPEG of what ``camera`` saw at observation ``index``."""
        with EpisodeStore(self._path) as store:
            entry, _ = self._find(store, id)
            arrays = store.map(entry)
            if camera not in frame_sizes(arrays) or not 0 <= index < entry.observations:
                raise NotFound("no such frame")
            return encode_jpeg(frame(arrays, camera, index), self._quality)

    def label(self, id: str, outcome: OutcomeLabel, *, person: str) -> None:
        """Relabel: an overlay, the episode itself never changes."""

        def write(store: EpisodeStore) -> None:
            if outcome == ABORT:
                labels = {OUTCOME: outcome, **({SUCCESS: None} if SUCCESS in store.labels(id) else {})}
                store.label_together(id, labels, author=person)
            else:
                store.label(id, SUCCESS, outcome == "success", author=person)

        self._change(id, write)

    def success_from(self, id: str, step: int, *, person: str, shown: str | None = None) -> None:
        """A success from control step ``step`` of the episode on, as it is shown: a label for the classifier.

        EpisodeError where it has no such step.
        """

        def write(store: EpisodeStore) -> None:
            entry, _ = self._find(store, id)
            if step > entry.steps:
                raise EpisodeError(f"the episode has {entry.steps} steps: its success cannot begin at step {step}")
            begin = {SUCCESS_FROM: step + entry.first}
            labelled = is_success({**store.labels(id), **begin}, entry.success)
            store.label_together(id, begin if labelled else {**begin, SUCCESS: True}, author=person)

        self._change(id, write, shown=shown)

    def delete(self, id: str, *, person: str) -> None:
        self._change(id, lambda store: store.delete(id, author=person))

    def trim(self, id: str, first: int, end: int, *, person: str, shown: str | None = None) -> None:
        """Keep control steps ``first`` .. ``end - 1``. Raises EpisodeError where it cannot be cut."""
        self._change(id, lambda store: store.trim(id, first, end, author=person), shown=shown)

    def split(self, id: str, at: int, *, person: str, shown: str | None = None) -> str:
        """The id of the part that begins at ``at``. Raises EpisodeError where it cannot be cut."""
        parts: tuple[str, str] = self._change(id, lambda store: store.split(id, at, author=person), shown=shown)
        return parts[1]

    def undo(self, id: str, *, person: str) -> tuple[str | None, str]:
        """The key of the label that was taken back, and the episode's id, which is another where a split was undone."""

        def undo(store: EpisodeStore) -> tuple[str | None, str]:
            change = store.undo(id, author=person)
            if change is None:
                return None, id
            return change.key, change.episode if change.key == SPLIT else id

        undone: tuple[str | None, str] = self._change(id, undo)
        return undone

    def _change(self, id: str, do: Callable[[EpisodeStore], Any], *, shown: str | None = None) -> Any:
        with self._changing, EpisodeStore(self._path) as store:
            entry, _ = self._find(store, id)
            if shown not in (None, f"{entry.first}-{entry.first + entry.steps}"):
                raise CutMeanwhile("somebody has cut this episode meanwhile; nothing was changed, look at it again")
            return do(store)

    def _find(self, store: EpisodeStore, id: str) -> tuple[Entry, dict[str, Any]]:
        if re.fullmatch(r"[0-9A-Z]{26}(\.\d+-\d+)?", id):
            with contextlib.suppress(EpisodeError):  # also where it is split: only its parts are shown
                return store.entry(id), store.labels(id)
        raise NotFound("no such episode")

    def _row(self, store: EpisodeStore, entry: Entry, labels: dict[str, Any]) -> dict[str, Any]:
        try:
            human, interventions, damaged = *self._person_share(store, entry), False
        except CorruptEpisode:
            human, interventions, damaged = 0.0, 0, True
        return {
            "id": entry.id,
            "task": entry.task,
            "instruction": entry.instruction,
            "steps": entry.steps,
            "span": entry.span,
            "recorded_steps": entry.locations["action"][2][0],
            "success": is_success(labels, entry.success),
            "recorded_success": entry.success,
            "deleted": bool(labels.get(DELETED, False)),
            "labels": labels,
            "source": entry.source,
            "policy": entry.policy_version[:12],
            "human_share": human,
            "interventions": interventions,
            "damaged": damaged,
        }

    def _person_share(self, store: EpisodeStore, entry: Entry) -> tuple[float, int]:
        """Share of a person's steps, and the number of interventions."""
        known = entry.id, entry.span
        if known not in self._persons:
            arrays = store.map(entry)
            numbers = np.unique(arrays.get("intervention", np.array([-1])))
            interventions = int((numbers >= 0).sum())
            self._persons[known] = round(float((arrays["actor"] == HUMAN).mean()), 3), interventions
        return self._persons[known]


def _matches(row: dict[str, Any], wanted: Filter) -> bool:
    return (
        (not wanted.task or row["task"] == wanted.task)
        and (wanted.outcome == "any" or row["success"] == (wanted.outcome == "success"))
        and (wanted.who == "any" or (row["human_share"] > 0) == (wanted.who == "corrected"))
        and row["deleted"] == wanted.deleted
    )
