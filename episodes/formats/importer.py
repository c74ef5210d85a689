"""Imports demonstrations that other projects recorded into an episode store (``vla-rl data import``)."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32, UInt8

from episodes.formats.recording import ImportMapping, Orientation, Recording
from episodes.formats.registry import read_recordings
from episodes.schema import ACTORS, HUMAN, Episode, EpisodeError
from episodes.store import EpisodeStore, Selection

ACTION_TOLERANCE = 1e-3  # recordings exceed their own limits by rounding; the excess is clipped


def import_episodes(source: Path, store: EpisodeStore, mapping: ImportMapping) -> dict[str, Any]:
    """Every episode of ``source``, in one of ``registry.FORMATS``; returns {episodes, successes, present}.

    ``present``: how many were in ``store`` already, with the same states and actions; they are not added again.
    Raises EpisodeError that names the file, the episode and what is missing; what was imported before stays.
    """
    successes = present = 0
    known = {_digest(store.map(entry)) for entry in store.select(Selection(sources=(ACTORS[HUMAN],)))}

    def episodes() -> Iterator[Episode]:
        nonlocal successes, present
        for number, recording in enumerate(read_recordings(source)):
            episode = to_episode(recording, mapping, number=number)
            if _digest({"state": episode.state, "action": episode.action}) in known:
                present += 1
                continue
            successes += episode.succeeded
            yield episode

    written = store.add_all(episodes())
    if not written and not present:
        raise EpisodeError(f"{source}: there is no episode in it")
    return {"episodes": len(written), "successes": successes, "present": present}


def _digest(arrays: Mapping[str, np.ndarray]) -> bytes:
    return hashlib.sha256(arrays["state"].tobytes() + arrays["action"].tobytes()).digest()


def to_episode(recording: Recording, mapping: ImportMapping, *, number: int) -> Episode:
    """The recording as an episode with seed ``number``. Raises EpisodeError where something is missing."""
    steps = len(recording.action)
    instruction, control_hz = _instruction(recording, mapping), _control_hz(recording, mapping)
    reward, success = _reward_and_success(recording)
    last = np.arange(steps) == steps - 1
    return Episode(
        state=_state(recording, mapping),
        images={camera: _images(recording, key, mapping.orientation) for camera, key in mapping.cameras.items()},
        observation_steps=np.arange(steps, dtype=np.int32),
        action=_scale_actions(recording, mapping),
        reward=reward,
        terminated=last & success,
        truncated=last & ~success,
        success=success,
        actor=np.full(steps, HUMAN, dtype=np.uint8),
        instruction=instruction,
        task=mapping.task or instruction,
        split="train",
        seed=number,
        source=ACTORS[HUMAN],
        control_hz=control_hz,
        fingerprint={"imported": recording.name},
    )


def _instruction(recording: Recording, mapping: ImportMapping) -> str:
    instruction = mapping.instruction or recording.instruction
    if not instruction:
        raise EpisodeError(f"{recording.name} does not say its instruction: give --instruction")
    return instruction


def _control_hz(recording: Recording, mapping: ImportMapping) -> float:
    control_hz = mapping.control_hz or recording.control_hz
    if not control_hz:
        raise EpisodeError(f"{recording.name} does not say its control rate: give --control-hz")
    return float(control_hz)


def _reward_and_success(recording: Recording) -> tuple[Float32[np.ndarray, " T"], Bool[np.ndarray, " T"]]:
    """Success from the first reward of 1 on. A recording without rewards is a demonstration: success at its end."""
    steps = len(recording.action)
    if recording.reward is None:
        return np.zeros(steps, dtype=np.float32), np.arange(steps) == steps - 1
    return recording.reward.astype(np.float32), np.maximum.accumulate(recording.reward >= 1.0)


def _state(recording: Recording, mapping: ImportMapping) -> Float32[np.ndarray, "T state_dim"]:
    if not mapping.state:
        raise EpisodeError(f"{recording.name}: name the keys of the state: --state, of {', '.join(recording.keys)}")
    parts = [_read(recording, key).reshape(len(recording.action), -1) for key in mapping.state]
    return np.concatenate(parts, axis=1).astype(np.float32)


def _read(recording: Recording, key: str) -> np.ndarray:
    if key not in recording.keys:
        raise EpisodeError(f"{recording.name} has no {key!r}; it has {', '.join(recording.keys)}")
    array = recording.read(key)
    if len(array) != len(recording.action):
        raise EpisodeError(f"{recording.name}: {key!r} has {len(array)} steps for {len(recording.action)} actions")
    return array


def _images(recording: Recording, key: str, orientation: Orientation) -> UInt8[np.ndarray, "T height width 3"]:
    images = _read(recording, key)
    upright = images if orientation == "as_recorded" else images[:, ::-1]
    return np.ascontiguousarray(upright[:, :, ::-1] if orientation == "half_turn" else upright)


def _scale_actions(recording: Recording, mapping: ImportMapping) -> Float32[np.ndarray, "T action_dim"]:
    """Actions in [-1, 1]."""
    low, high = np.asarray(mapping.action_low), np.asarray(mapping.action_high)
    action = 2.0 * (recording.action - low) / (high - low) - 1.0
    largest = np.abs(action).max()
    if largest > 1.0 + ACTION_TOLERANCE:
        raise EpisodeError(
            f"{recording.name}: actions reach {np.abs(recording.action).max():g}, which is {largest:g} times the range "
            "of --action-low and --action-high; give the limits of the recording's actions"
        )
    return np.clip(action, -1.0, 1.0).astype(np.float32)
