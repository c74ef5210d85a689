"""The formats that can be imported."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from episodes.formats.lerobot import is_lerobot, read_lerobot
from episodes.formats.recording import Recording
from episodes.formats.robomimic import is_robomimic, read_robomimic
from episodes.formats.transitions import is_transitions, read_transitions
from episodes.schema import EpisodeError


@dataclass(frozen=True, kw_only=True)
class Format:
    """``matches``: whether a path has this format. ``read``: its episodes; raises EpisodeError if it is damaged."""

    description: str
    matches: Callable[[Path], bool]
    read: Callable[[Path], Iterator[Recording]]


FORMATS: dict[str, Format] = {
    "transitions": Format(
        description="transitions of D4RL (.hdf5) or Minari (a folder)", matches=is_transitions, read=read_transitions
    ),
    "robomimic": Format(description="a robomimic file (.hdf5)", matches=is_robomimic, read=read_robomimic),
    "lerobot": Format(
        description="a LeRobot data set (a folder with meta/info.json)", matches=is_lerobot, read=read_lerobot
    ),
}


def read_recordings(source: Path) -> Iterator[Recording]:
    """The episodes of ``source`` in order. Raises EpisodeError if it has none of ``FORMATS``."""
    for format in FORMATS.values():
        if format.matches(source):
            return format.read(source)
    raise EpisodeError(f"{source} is neither {' nor '.join(format.description for format in FORMATS.values())}")
