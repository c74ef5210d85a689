"""What the episodes of one store have in common, so that one policy can learn from all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass

from episodes.catalog import Entry
from episodes.packing import frame_sizes
from episodes.schema import CorruptEpisode, Episode
from episodes.store import EpisodeStore


@dataclass(frozen=True, kw_only=True)
class Layout:
    """``cameras``: name -> (height, width) of its images."""

    cameras: Mapping[str, tuple[int, int]]
    state_dim: int
    action_dim: int
    control_hz: float

    def __str__(self) -> str:
        cameras = ", ".join(f"{name} {height}x{width}" for name, (height, width) in sorted(self.cameras.items()))
        dimensions = f"{self.state_dim} state and {self.action_dim} action dimensions"
        return f"cameras {cameras or 'none'}, {dimensions}, {self.control_hz} Hz"


def episode_layout(episode: Episode) -> Layout:
    sizes = {camera: (frames.shape[1], frames.shape[2]) for camera, frames in episode.images.items()}
    state_dim, action_dim = episode.state.shape[1], episode.action.shape[1]
    return Layout(cameras=sizes, state_dim=state_dim, action_dim=action_dim, control_hz=episode.control_hz)


def layout_of(store: EpisodeStore, entry: Entry) -> Layout:
    """Of one episode. Raises CorruptEpisode if the file is missing or truncated."""
    arrays = store.map(entry)
    state_dim, action_dim = (arrays[name].shape[1] for name in ("state", "action"))
    return Layout(cameras=frame_sizes(arrays), state_dim=state_dim, action_dim=action_dim, control_hz=entry.control_hz)


def store_layout(store: EpisodeStore) -> Layout | None:
    """Of the oldest episode that can be read and is not deleted; None where there is none."""
    for entry in store.select():
        with contextlib.suppress(CorruptEpisode):
            return layout_of(store, entry)
    return None
