"""``vla-rl bench store``: episodes written, opened, checked and read as windows, beside what disk and memory allow."""

from __future__ import annotations

import hashlib
import os
import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

from episodes.sampler import WindowSampler
from episodes.schema import ACTORS, Episode
from episodes.store import EpisodeStore
from vla_rl.bench.example import EXAMPLE_ROBOT
from vla_rl.bench.record import Row, median_seconds, row

EPISODES, STEPS, BATCH, HORIZON = 40, 60, 256, 8


def store_rows(episodes: int = EPISODES, *, repeats: int = 5) -> list[Row]:
    """Of episodes of two cameras and 60 observations, below the present folder, whose disk is measured.

    Writing beside a file of as many bytes that reaches the disk; in processor time checking beside the hash alone, and
    windows beside a copy of as many frames in memory.
    """
    rng = np.random.default_rng(0)
    elapsed = partial(median_seconds, repeats=repeats)
    computed = partial(median_seconds, repeats=repeats, clock=time.process_time)
    with tempfile.TemporaryDirectory(prefix="bench-store-", dir=Path.cwd()) as name:
        folder = Path(name)
        path = folder / "store"
        with EpisodeStore(path, create=True) as store:
            store.add_all(random_episode(rng) for _ in range(episodes))
            files = [store.file(entry.id) for entry in store.entries()]
            size = sum(file.stat().st_size for file in files) / episodes
            more = iter([random_episode(rng) for _ in range(repeats + 1)])
            write = elapsed(lambda: store.add(next(more)))
            entries = store.entries()
            check = computed(lambda: store.verify(entries)) / len(entries)
            sampler = WindowSampler(store, action_horizon=HORIZON, batch_size=BATCH, seed=0)
            windows = computed(sampler.next_batch)
        content = files[0].read_bytes()
        plain = elapsed(partial(write_to_disk, folder / "plain", content))
        hashed = computed(lambda: hashlib.sha256(files[0].read_bytes()))
        opened = elapsed(partial(open_and_close, path))
    frames = np.stack([episode_frames(rng) for _ in range(episodes * STEPS)])
    copied = computed(lambda: frames[rng.integers(0, len(frames), BATCH)])
    return [
        row("bytes of an episode", size, "B"),
        row("written", size / write / 1e6, "MB/s", ratio=plain / write, against="one file, fsync"),
        row("checked", size / check / 1e6, "MB/s", ratio=hashed / check, against="SHA-256"),
        row(f"opened, {len(entries)} episodes", 1e3 * opened, "ms"),
        row("windows", BATCH / windows, "1/s", ratio=copied / windows, against="frames copied in memory"),
    ]


def episode_frames(rng: np.random.Generator) -> np.ndarray:
    """Noise, of all cameras at one observation."""
    robot = EXAMPLE_ROBOT
    return rng.integers(0, 256, (len(robot.cameras), *robot.image_size, 3), dtype=np.uint8)


def random_episode(rng: np.random.Generator) -> Episode:
    """Of the example robot, observed at every control step; pixels are noise, which no file format makes smaller."""
    robot, observations = EXAMPLE_ROBOT, STEPS + 1
    frames = np.stack([episode_frames(rng) for _ in range(observations)], axis=1)
    done = np.arange(STEPS) == STEPS - 1
    return Episode(
        images=dict(zip(robot.cameras, frames, strict=True)),
        observation_steps=np.arange(observations, dtype=np.int32),
        state=rng.normal(size=(observations, robot.state_dim)).astype(np.float32),
        action=rng.uniform(-1, 1, (STEPS, robot.action_dim)).astype(np.float32),
        reward=done.astype(np.float32),
        terminated=done,
        truncated=np.zeros(STEPS, np.bool_),
        success=done,
        actor=np.full(STEPS, ACTORS.index("expert"), np.uint8),
        instruction="pick up the cube",
        task="pick",
        split="train",
        seed=0,
        source="expert",
        control_hz=robot.control_hz,
    )


def write_to_disk(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def open_and_close(path: Path) -> None:
    with EpisodeStore(path) as store:
        store.entries()
