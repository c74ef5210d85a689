"""Trimmed and split episodes: which of the recorded control steps are read. Labels say so; files never change.

    recorded   0 1 2 3 4 5 6 7 8 9      ID
    trimmed        2 3 4 5 6 7 8        ID            trim = "2-9", the step after the last one is 9
    split          2 3 4 | 5 6 7 8      ID.2-5 ID.5-9 split = 5

Labels count steps as recorded. A part has the labels of what it was split from, until it gets its own, and can be
trimmed and split again. Cutting does not change whether an episode counts as a success; a label of a part does, also
an abort of what was labelled a success as a whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from episodes.overlays import ABORT, OUTCOME, REPAIR, SPLIT, SUCCESS, TRIM, Labels, LabelValue, recorded_id
from episodes.packing import Arrays
from episodes.schema import EpisodeError


@dataclass(frozen=True, kw_only=True)
class Part:
    """Steps ``first`` .. ``end - 1`` of a recorded episode. ``lineage``: ids from the recorded episode's to its own.

    ``ends_as_labelled``: as of ``Entry``.
    """

    lineage: tuple[str, ...]
    first: int
    end: int
    labels: dict[str, LabelValue]
    ends_as_labelled: bool

    @property
    def id(self) -> str:
        return self.lineage[-1]


def parts_of(id: str, steps: int, labels: Labels) -> Iterator[Part]:
    """What is read of the recorded episode ``id``, in order of time: itself, or the parts that it is split into.

    EpisodeError where it is trimmed to steps that it does not have.
    """
    yield from _parts((id,), 0, steps, labels, inherited={}, ends_as_labelled=True)


def _parts(
    lineage: tuple[str, ...],
    first: int,
    end: int,
    labels: Labels,
    *,
    inherited: Mapping[str, LabelValue],
    ends_as_labelled: bool,
) -> Iterator[Part]:
    given = labels.get(lineage[-1], {})
    own, ends_as_labelled = _own(inherited, given), ends_as_labelled or SUCCESS in given
    if TRIM in own:
        low, high = (int(step) for step in str(own[TRIM]).split("-"))
        if low < first or high > end:
            had = f"{lineage[-1]} has steps {first} to {end}"
            raise EpisodeError(f"episode {had}, but is trimmed to {own[TRIM]}; {REPAIR}")
        first, end = low, high
    at = int(own.get(SPLIT, first))
    if not first < at < end:
        yield Part(lineage=lineage, first=first, end=end, labels=own, ends_as_labelled=ends_as_labelled)
        return
    for begin, stop, ends in ((first, at, False), (at, end, ends_as_labelled)):
        part = (*lineage, f"{recorded_id(lineage[0])}.{begin}-{stop}")
        yield from _parts(part, begin, stop, labels, inherited=own, ends_as_labelled=ends)


def labels_of(lineage: Sequence[str], labels: Labels) -> dict[str, LabelValue]:
    """Of the last of these ids, which begin with the recorded episode's; where it is split, what its parts inherit."""
    own: dict[str, LabelValue] = {}
    for id in lineage:
        own = _own(own, labels.get(id, {}))
    return own


def _own(inherited: Mapping[str, LabelValue], given: Mapping[str, LabelValue]) -> dict[str, LabelValue]:
    """A part that is aborted takes the place of a success of the whole."""
    own = {key: value for key, value in inherited.items() if key not in (TRIM, SPLIT)} | dict(given)
    if given.get(OUTCOME) == ABORT and SUCCESS not in given:
        own.pop(SUCCESS, None)
    return own


def cut(arrays: Arrays, first: int, end: int) -> Arrays:
    """Control steps ``first`` .. ``end - 1`` and their observations, that after the last step too; views."""
    observed = arrays["observation_steps"]
    low, high = np.searchsorted(observed, first), np.searchsorted(observed, end, side="right")
    return {name: _cut_array(name, array, slice(first, end), slice(low, high)) for name, array in arrays.items()} | {
        "observation_steps": observed[low:high] - np.int32(first)
    }


def _cut_array(name: str, array: np.ndarray, steps: slice, observations: slice) -> np.ndarray:
    if name == "state" or name.startswith("images/"):
        return array[observations]
    return array[steps]
