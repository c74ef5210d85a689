"""Pairs of recorded observations, and the file of which of them is preferred. One line a pair:

    {"episodes": ["...", "..."], "steps": [0, 24], "preferred": 1}

``steps``: control steps before each observation. ``preferred``: 0 the first, 1 the second, -1 no preference. A person
labels by changing or writing such lines: ``labels: {name: file, path: pairs.jsonl}``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Bool, Int

from episodes.files import write_atomically
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.scorer import RewardModelError

NO_PREFERENCE = -1


@dataclass(frozen=True)
class Pairs:
    """``rows``: the numbers of two observations (``LabeledEpisodes``), and 0, 1 or NO_PREFERENCE."""

    rows: Int[np.ndarray, "N 3"]

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def first(self) -> Int[np.ndarray, " N"]:
        return self.rows[:, 0]

    @property
    def second(self) -> Int[np.ndarray, " N"]:
        return self.rows[:, 1]

    @property
    def preferred(self) -> Int[np.ndarray, " N"]:
        return self.rows[:, 2]

    def decided(self) -> Pairs:
        """Those with a preference."""
        return Pairs(self.rows[self.preferred != NO_PREFERENCE])


@runtime_checkable
class Labels(Protocol):
    """Whatever prefers one of two recorded observations: the truth (truth.py), a vision-language model (vlm.py)."""

    def __call__(self, first: Int[np.ndarray, " N"], second: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
        """0: the first of each pair, 1: the second, or NO_PREFERENCE."""
        ...


def draw_pairs(
    recorded: LabeledEpisodes, held_out: Bool[np.ndarray, " F"], count: int, rng: np.random.Generator
) -> Pairs:
    """Two different observations of one instruction each, both of them ``held_out`` or neither; no preferences yet.

    An observation that has no other of its instruction on its side is left out. RewardModelError where all are.
    """
    _, instruction = np.unique([entry.instruction for entry in recorded.entries], return_inverse=True)
    group = 2 * instruction[recorded.episode] + held_out
    size = np.bincount(group)
    ordered = np.argsort(group, kind="stable")
    ordered = ordered[size[group[ordered]] > 1]
    if not len(ordered):
        raise RewardModelError("no two observations have the same instruction; record more episodes of one")
    size = np.where(size > 1, size, 0)
    ends = np.cumsum(size)
    place = rng.integers(len(ordered), size=count)
    of = np.searchsorted(ends, place, side="right")  # its group
    begin = (ends - size)[of]
    other = begin + (place - begin + rng.integers(1, size[of])) % size[of]
    return Pairs(np.stack([ordered[place], ordered[other], np.full(count, NO_PREFERENCE)], axis=1))


def write_pairs(path: Path, pairs: Pairs, recorded: LabeledEpisodes) -> None:
    """Replace the file ``path``."""
    lines = []
    for *pair, preferred in pairs.rows.tolist():
        episodes = [recorded.entries[recorded.episode[at]].id for at in pair]
        steps = [int(recorded.step[at]) for at in pair]
        lines.append(json.dumps({"episodes": episodes, "steps": steps, "preferred": preferred}) + "\n")
    write_atomically(path, "".join(lines).encode())


def read_pairs(path: Path, recorded: LabeledEpisodes) -> Pairs:
    """RewardModelError, which names the line, where one is no pair of observations of ``recorded``."""
    if not path.is_file():
        raise RewardModelError(f"{path}: no such file of labeled pairs")
    ids = [recorded.entries[episode].id for episode in recorded.episode]
    numbers = {place: at for at, place in enumerate(zip(ids, recorded.step.tolist(), strict=True))}
    rows = []
    for i, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            rows.append(_pair(json.loads(line), numbers))
        except (ValueError, KeyError, TypeError) as error:
            raise RewardModelError(f"{path}, line {i}: {error}") from None
    return Pairs(np.array(rows, dtype=np.int64).reshape(-1, 3))


def _pair(line: Any, numbers: dict[tuple[str, int], int]) -> tuple[int, int, int]:
    if not isinstance(line, dict) or set(line) != {"episodes", "steps", "preferred"}:
        raise ValueError(f"expected the keys episodes, steps and preferred, got {line!r}")
    if line["preferred"] not in (0, 1, NO_PREFERENCE):
        raise ValueError(f"preferred is {line['preferred']!r}, it must be 0, 1 or {NO_PREFERENCE}")
    first, second = zip(line["episodes"], line["steps"], strict=True)
    for which in (first, second):
        if which not in numbers:
            raise ValueError(f"the stores have no observation of episode {which[0]!r} at control step {which[1]!r}")
    return numbers[first], numbers[second], line["preferred"]
