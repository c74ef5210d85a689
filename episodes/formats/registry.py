"""The formats that can be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from episodes.formats.lerobot import find_lerobot, is_lerobot
from episodes.formats.recording import Found
from episodes.formats.robomimic import find_robomimic, is_robomimic
from episodes.formats.transitions import find_transitions, is_transitions
from episodes.schema import EpisodeError


@dataclass(frozen=True, kw_only=True)
class Format:
    """``matches``: whether a path has this format. ``find``: its episodes; raises EpisodeError if it is damaged.

    An episode can be loaded until the next one is asked for.
    """

    description: str
    matches: Callable[[Path], bool]
    find: Callable[[Path], Iterator[Found]]


FORMATS: dict[str, Format] = {
    "transitions": Format(
        description="transitions of D4RL (.hdf5) or Minari (a folder)", matches=is_transitions, find=find_transitions
    ),
    "robomimic": Format(description="a robomimic file (.hdf5)", matches=is_robomimic, find=find_robomimic),
    "lerobot": Format(
        description="a LeRobot data set (a folder with meta/info.json)", matches=is_lerobot, find=find_lerobot
    ),
}


def find_recordings(source: Path) -> Iterator[Found]:
    """The episodes of ``source`` in order. Raises EpisodeError if it does not exist or has none of ``FORMATS``."""
    if not source.exists():
        raise EpisodeError(f"{source}: no such file")
    for format in FORMATS.values():
        if format.matches(source):
            return format.find(source)
    raise EpisodeError(f"{source} is neither {' nor '.join(format.description for format in FORMATS.values())}")
