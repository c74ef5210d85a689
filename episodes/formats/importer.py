"""Demonstrations that other projects recorded, into an episode store: ``vla-rl data import``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from episodes.schema import HUMAN, SOURCES, Episode, EpisodeError
from episodes.store import EpisodeStore

Orientation = Literal["as_recorded", "upside_down", "half_turn"]
SLACK = 1e-3  # recordings overstep their own limits by rounding


@dataclass(frozen=True, kw_only=True)
class Mapped:
    """How a recording becomes an episode of one of our worlds.

    ``cameras``: the world's camera -> the recording's key. ``state``: keys whose numbers make the state, in order.
    ``task``, ``instruction``, ``control_hz``: where the recording does not say, or says something else.
    ``action_low``, ``action_high``: what the recording means by our -1 and 1, one number or one per dimension.
    ``orientation``: recordings of OpenGL cameras may be "upside_down" (row 0 is the bottom), "half_turn" turns them by
    180 degrees, which is how LIBERO's benchmark shows its own.
    """

    cameras: Mapping[str, str] = field(default_factory=dict)
    state: tuple[str, ...] = ()
    task: str | None = None
    instruction: str | None = None
    control_hz: float | None = None
    action_low: tuple[float, ...] = (-1.0,)
    action_high: tuple[float, ...] = (1.0,)
    orientation: Orientation = "as_recorded"


@dataclass(frozen=True, kw_only=True)
class Recording:
    """One recorded episode as its file has it: an observation before every action.

    ``read``: the rows [T, ...] of a key. ``reward``: [T], None where the file has none. ``where``: for messages.
    """

    where: str
    read: Any
    keys: tuple[str, ...]
    action: np.ndarray
    reward: np.ndarray | None
    instruction: str | None
    control_hz: float | None


def import_episodes(source: Path, store: EpisodeStore, mapped: Mapped) -> dict[str, Any]:
    """Every episode of ``source``, a robomimic HDF5 file or a LeRobot data set; returns {episodes, successes}.

    Raises EpisodeError that names the file, the episode and what is missing; what was imported before stays.
    """
    wins = 0

    def episodes() -> Iterator[Episode]:
        nonlocal wins
        for number, recording in enumerate(_recordings(source)):
            episode = to_episode(recording, mapped, number=number)
            wins += episode.succeeded
            yield episode

    written = store.add_all(episodes())
    if not written:
        raise EpisodeError(f"{source}: there is no episode in it")
    return {"episodes": len(written), "successes": wins}


def _recordings(source: Path) -> Iterable[Recording]:
    if (source / "meta" / "info.json").is_file():
        from episodes.formats.lerobot import read_lerobot

        return read_lerobot(source)
    if source.suffix in (".hdf5", ".h5"):
        from episodes.formats.robomimic import read_robomimic

        return read_robomimic(source)
    raise EpisodeError(
        f"{source} is neither a robomimic file (.hdf5) nor a LeRobot data set (a folder with meta/info.json)"
    )


def to_episode(recording: Recording, mapped: Mapped, *, number: int) -> Episode:
    """A recording without rewards is a demonstration: taken as a success at its last step."""
    steps = len(recording.action)
    reward = np.zeros(steps) if recording.reward is None else recording.reward
    success = np.maximum.accumulate(reward >= 1.0) if recording.reward is not None else np.arange(steps) == steps - 1
    ended = np.arange(steps) == steps - 1
    instruction = mapped.instruction or recording.instruction
    control_hz = mapped.control_hz or recording.control_hz
    if not instruction:
        raise EpisodeError(f"{recording.where} does not say its instruction: give --instruction")
    if not control_hz:
        raise EpisodeError(f"{recording.where} does not say its control rate: give --control-hz")
    if not mapped.state:
        raise EpisodeError(f"{recording.where}: name the keys of the state: --state, of {', '.join(recording.keys)}")
    state = [_read(recording, key).reshape(steps, -1) for key in mapped.state]
    images = {camera: _read(recording, key) for camera, key in mapped.cameras.items()}
    return Episode(
        images={camera: _turned(rows, mapped.orientation) for camera, rows in images.items()},
        look_steps=np.arange(steps, dtype=np.int32),
        state=np.concatenate(state, axis=1).astype(np.float32),
        action=_scaled(recording, mapped),
        reward=reward.astype(np.float32),
        terminated=ended & success,
        truncated=ended & ~success,
        success=success,
        actor=np.full(steps, HUMAN, dtype=np.uint8),
        instruction=instruction,
        task=mapped.task or instruction,
        split="train",
        seed=number,
        source=SOURCES[HUMAN],
        control_hz=float(control_hz),
        fingerprint={"imported": recording.where},
    )


def _read(recording: Recording, key: str) -> np.ndarray:
    if key not in recording.keys:
        raise EpisodeError(f"{recording.where} has no {key!r}; it has {', '.join(recording.keys)}")
    rows: np.ndarray = recording.read(key)
    if len(rows) != len(recording.action):
        raise EpisodeError(f"{recording.where}: {key!r} has {len(rows)} rows for {len(recording.action)} actions")
    return rows


def _turned(images: np.ndarray, orientation: Orientation) -> np.ndarray:
    """[T, height, width, 3]"""
    rows = images if orientation == "as_recorded" else images[:, ::-1]
    return np.ascontiguousarray(rows[:, :, ::-1] if orientation == "half_turn" else rows)


def _scaled(recording: Recording, mapped: Mapped) -> np.ndarray:
    """float32 [T, A] in [-1, 1]."""
    low, high = np.asarray(mapped.action_low), np.asarray(mapped.action_high)
    action = 2.0 * (recording.action - low) / (high - low) - 1.0
    over = np.abs(action).max()
    if over > 1.0 + SLACK:
        raise EpisodeError(
            f"{recording.where}: actions reach {np.abs(recording.action).max():g}, which is {over:g} of what "
            "--action-low and --action-high say; give the limits that the recording's actions have"
        )
    return np.clip(action, -1.0, 1.0).astype(np.float32)
