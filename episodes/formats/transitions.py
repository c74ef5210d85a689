"""Reads transitions as offline RL has them: D4RL's flat files and Minari's data sets, both HDF5.

    D4RL     observations [N, ...], actions [N, A], rewards, terminals, timeouts [N]; some also next_observations
    Minari   FOLDER/data/main_data.hdf5 (or that file itself): episode_<n>/observations [T + 1, ...] or a group of such
             (nested keys are joined with "/"), actions [T, A], rewards, terminations, truncations [T]

(github.com/Farama-Foundation/D4RL, README; minari.farama.org, "Dataset Standards".) An episode of D4RL ends where it
terminates or its time runs out; transitions after the last such end are left out, for they may be cut off anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from episodes.formats.recording import Found, Recording, actions
from episodes.formats.robomimic import is_robomimic, open_hdf5
from episodes.schema import EpisodeError

FLAT = ("observations", "actions", "rewards", "terminals")
FIRST = "episode_0"


def is_transitions(path: Path) -> bool:
    """Without h5py no HDF5 file is: the next format says what to install."""
    if path.is_dir():
        return (path / "data" / "main_data.hdf5").exists()
    if not is_robomimic(path) or not path.exists() or find_spec("h5py") is None:
        return False
    with open_hdf5(path) as file:
        return FIRST in file or "observations" in file


def find_transitions(path: Path) -> Iterator[Found]:
    """Every episode in order. Raises EpisodeError if something is missing."""
    with open_hdf5(path / "data" / "main_data.hdf5" if path.is_dir() else path) as file:
        yield from _minari(path.name, file) if FIRST in file else _flat(path.name, file)


def _flat(name: str, file: Any) -> Iterator[Found]:
    if missing := [key for key in FLAT if key not in file]:
        raise EpisodeError(f"{name} has no {', '.join(missing)}, which D4RL's layout has; it has {', '.join(file)}")
    terminals = np.asarray(file["terminals"]).reshape(-1).astype(bool)
    timeouts = np.asarray(file["timeouts"]).reshape(-1).astype(bool) if "timeouts" in file else terminals
    ends = np.flatnonzero(terminals | timeouts)
    if not len(ends):
        raise EpisodeError(f"{name}: neither terminals nor timeouts marks the end of an episode")
    for number, (first, last) in enumerate(zip([0, *(ends[:-1] + 1)], ends, strict=True)):
        episode, rows = f"{name}: episode {number}", slice(int(first), int(last) + 1)
        yield Found(name=episode, load=partial(_of_rows, episode, file, rows, terminated=bool(terminals[last])))


def _of_rows(name: str, file: Any, rows: slice, *, terminated: bool) -> Recording:
    return Recording(
        name=name,
        read=lambda key: np.asarray(file[key][rows]),
        keys=("observations", "rewards"),
        outcomes=("rewards",),
        final=(lambda key: np.asarray(file[f"next_{key}"][rows.stop - 1])) if "next_observations" in file else None,
        action=actions(name, file["actions"][rows]),
        reward=np.asarray(file["rewards"][rows], dtype=np.float64).reshape(-1),
        instructions=(),
        control_hz=None,
        terminated=terminated,
    )


def _minari(name: str, file: Any) -> Iterator[Found]:
    for key in sorted(file, key=lambda key: int(key.rpartition("_")[2])):
        episode = f"{name}: {key}"
        yield Found(name=episode, load=partial(_of_group, episode, file[key]))


def _of_group(name: str, group: Any) -> Recording:
    needed = ("observations", "actions", "rewards", "terminations")
    if missing := [key for key in needed if key not in group]:
        raise EpisodeError(f"{name} has no {', '.join(missing)}, only {', '.join(group)}; record it again")
    return Recording(
        name=name,
        read=lambda key: np.asarray(group[key] if key == "rewards" else group[key][:-1]),
        keys=(*_leaves(group["observations"], "observations"), "rewards"),
        outcomes=("rewards",),
        final=lambda key: np.asarray(group[key][-1]),
        action=actions(name, group["actions"]),
        reward=np.asarray(group["rewards"], dtype=np.float64),
        instructions=(),
        control_hz=None,
        terminated=bool(group["terminations"][-1]),
    )


def _leaves(node: Any, name: str) -> tuple[str, ...]:
    """The names of all arrays below ``node``."""
    if hasattr(node, "shape"):
        return (name,)
    return tuple(leaf for key in node for leaf in _leaves(node[key], f"{name}/{key}"))
