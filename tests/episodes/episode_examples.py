"""Episodes whose values encode their episode and step."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from episodes.schema import EXPERT, Episode
from episodes.store import EpisodeStore

ACTION_DIM, STATE_DIM, SIZE = 3, 4, 8


def make_episode(*, steps: int = 6, every: int = 1, seed: int = 0, **changes: Any) -> Episode:
    """state = [seed, observation step, 0, 0], action = [step / 1000, seed / 1000 % 1, 0], pixels = observation step."""
    observation_steps = np.arange(0, steps + 1, every, dtype=np.int32)
    state = np.zeros((len(observation_steps), STATE_DIM), dtype=np.float32)
    state[:, 0], state[:, 1] = seed, observation_steps
    action = np.zeros((steps, ACTION_DIM), dtype=np.float32)
    action[:, 0], action[:, 1] = np.arange(steps) / 1000, seed % 1000 / 1000
    pixels = observation_steps.astype(np.uint8)[:, None, None, None]
    frames = np.broadcast_to(pixels, (len(observation_steps), SIZE, SIZE, 3))
    last = np.arange(steps) == steps - 1
    episode = Episode(
        images={"front": frames.copy(), "wrist": frames + np.uint8(100)},
        observation_steps=observation_steps,
        state=state,
        action=action,
        reward=last.astype(np.float32),
        terminated=last,
        truncated=np.zeros(steps, dtype=bool),
        success=last.copy(),
        actor=np.full(steps, EXPERT, dtype=np.uint8),
        instruction=f"do number {seed}",
        task="push",
        split="train",
        seed=seed,
        source="expert",
        control_hz=20.0,
        fingerprint={"mujoco": "4.0.0"},
    )
    return dataclasses.replace(episode, **changes)


def assert_same(got: Episode, expected: Episode) -> None:
    for field in dataclasses.fields(Episode):
        a, b = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "images":
            assert list(a) == list(b)
            for camera in b:
                np.testing.assert_array_equal(a[camera], b[camera])
        elif isinstance(b, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b, field.name


def write_episodes(store: Path, log: Path, first: int, count: int) -> None:
    """Log an id only after ``add`` has returned."""
    with EpisodeStore(store, create=True) as opened, log.open("ab", buffering=0) as file:
        for seed in range(first, first + count):
            file.write(opened.add(make_episode(steps=20, seed=seed)).encode() + b"\n")
