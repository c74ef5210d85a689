"""Reads transitions as offline RL has them: D4RL's flat files and Minari's data sets, both HDF5.

    D4RL     observations [N, ...], actions [N, A], rewards, terminals, timeouts [N]; some also next_observations
    Minari   FOLDER/data/main_data.hdf5 (or that file itself): episode_<n>/observations [T + 1, ...] or a group of such
             (nested keys are joined with "/"), actions [T, A], rewards, terminations, truncations [T]

(github.com/Farama-Foundation/D4RL, README; minari.farama.org, "Dataset Standards".) An episode of D4RL ends where it
terminates or its time runs out; transitions after the last such end are left out, for they may be cut off anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from episodes.formats.recording import Recording
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


def read_transitions(path: Path) -> Iterator[Recording]:
    """Every episode in order. Raises EpisodeError if something is missing."""
    with open_hdf5(path / "data" / "main_data.hdf5" if path.is_dir() else path) as file:
        yield from _minari(path.name, file) if FIRST in file else _flat(path.name, file)


def _flat(name: str, file: Any) -> Iterator[Recording]:
    if missing := [key for key in FLAT if key not in file]:
        raise EpisodeError(f"{name} has no {', '.join(missing)}, which D4RL's layout has; it has {', '.join(file)}")
    terminals = np.asarray(file["terminals"]).reshape(-1).astype(bool)
    timeouts = np.asarray(file["timeouts"]).reshape(-1).astype(bool) if "timeouts" in file else terminals
    ends = np.flatnonzero(terminals | timeouts)
    if not len(ends):
        raise EpisodeError(f"{name}: neither terminals nor timeouts marks the end of an episode")
    for number, (first, last) in enumerate(zip([0, *(ends[:-1] + 1)], ends, strict=True)):
        rows = slice(int(first), int(last) + 1)
        following = file["next_observations"][int(last)] if "next_observations" in file else None
        yield Recording(
            name=f"{name}: episode {number}",
            read=lambda key, rows=rows: np.asarray(file[key][rows]),  # type: ignore[misc]
            keys=("observations", "rewards"),
            outcomes=("rewards",),
            final=None if following is None else lambda key, value=following: np.asarray(value),  # type: ignore[misc]
            action=np.asarray(file["actions"][rows], dtype=np.float64),
            reward=np.asarray(file["rewards"][rows], dtype=np.float64).reshape(-1),
            instruction=None,
            control_hz=None,
            terminated=bool(terminals[last]),
        )


def _minari(name: str, file: Any) -> Iterator[Recording]:
    for episode in sorted(file, key=lambda key: int(key.rpartition("_")[2])):
        group = file[episode]
        observed = _leaves(group["observations"], "observations")
        yield Recording(
            name=f"{name}: {episode}",
            read=lambda key, group=group: np.asarray(group[key] if key == "rewards" else group[key][:-1]),  # type: ignore[misc]
            keys=(*observed, "rewards"),
            outcomes=("rewards",),
            final=lambda key, group=group: np.asarray(group[key][-1]),  # type: ignore[misc]
            action=np.asarray(group["actions"], dtype=np.float64),
            reward=np.asarray(group["rewards"], dtype=np.float64),
            instruction=None,
            control_hz=None,
            terminated=bool(group["terminations"][-1]),
        )


def _leaves(node: Any, name: str) -> tuple[str, ...]:
    """The names of all arrays below ``node``."""
    if hasattr(node, "shape"):
        return (name,)
    return tuple(leaf for key in node for leaf in _leaves(node[key], f"{name}/{key}"))
