"""Stores written before schema version 2 stay readable; their catalog is rebuilt."""

import hashlib
import json
import sqlite3
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import zarr

from episodes.catalog import CATALOG_NAME
from episodes.maintenance import info, rebuild
from episodes.sampler import WindowSampler
from episodes.schema import ARRAYS, Episode
from episodes.store import EpisodeStore
from tests.episodes.episode_examples import assert_same, make_episode

CATALOG_1 = """CREATE TABLE episodes (
    id TEXT PRIMARY KEY, task TEXT NOT NULL, instruction TEXT NOT NULL, success INTEGER NOT NULL,
    steps INTEGER NOT NULL, looks INTEGER NOT NULL, bytes INTEGER NOT NULL, source TEXT NOT NULL,
    split TEXT NOT NULL, seed INTEGER NOT NULL, policy_version TEXT NOT NULL, layout TEXT NOT NULL) WITHOUT ROWID"""
ATTRIBUTES = ("id", "instruction", "task", "split", "seed", "source", "control_hz", "policy_version", "fingerprint")


def write_version_1(folder: Path, episode: Episode, *, schema: str = "vla-rl-episode/1") -> Path:
    """The episode's file in the layout of version 1, written by zarr."""
    arrays = {name: getattr(episode, name) for name in ARRAYS}
    arrays["look_steps"] = arrays.pop("observation_steps")
    path = folder / f"ep-{episode.id}.zarr.zip"
    with zarr.storage.ZipStore(path, mode="w", compression=zipfile.ZIP_STORED) as zipped:
        attributes = {"schema": schema, **{name: getattr(episode, name) for name in ATTRIBUTES}}
        group = zarr.create_group(zipped, zarr_format=3, attributes=attributes)
        for name, array in arrays.items():
            group.create_array(
                name, data=array, chunks=array.shape, compressors=None, config={"write_empty_chunks": True}
            )
        images = group.create_group("images")
        for camera, frames in episode.images.items():
            images.create_array(
                camera, data=frames, chunks=frames.shape, compressors=None, config={"write_empty_chunks": True}
            )
    content = path.read_bytes()[:-2] + struct.pack("<H", 71)  # length of the comment, which holds the hash
    path.write_bytes(content + b"sha256:" + hashlib.sha256(content).hexdigest().encode())
    return path


def write_catalog_1(folder: Path, path: Path, episode: Episode) -> None:
    """A catalog of version 1 with this episode in it."""
    values = (episode.id, episode.task, episode.instruction, True, episode.num_steps, len(episode.state))
    values += (path.stat().st_size, episode.source, episode.split, episode.seed, "", json.dumps({}))
    connection = sqlite3.connect(folder / CATALOG_NAME)
    with connection:
        connection.execute(CATALOG_1)
        connection.execute(f"INSERT INTO episodes VALUES ({', '.join('?' * len(values))})", values)
        connection.execute("PRAGMA user_version=1")
    connection.close()


@pytest.mark.parametrize("with_catalog", [False, True])
def test_an_old_store_is_read_and_extended(tmp_path: Path, with_catalog: bool) -> None:
    old, new = make_episode(every=2, seed=1), make_episode(every=2, seed=2)
    path = write_version_1(tmp_path, old)
    if with_catalog:
        write_catalog_1(tmp_path, path, old)
    content = path.read_bytes()
    with EpisodeStore(tmp_path) as store:
        store.add(new)
        assert [(entry.seed, entry.steps, entry.observations) for entry in store.select()] == [(1, 6, 4), (2, 6, 4)]
        assert_same(store.read(old.id), old)
        assert store.read(old.id).step_policy_version is None
        sampler = WindowSampler(store, action_horizon=3, batch_size=6, seed=0)
        batch = sampler.windows(np.arange(6))
    assert batch.obs.state[:, :2].tolist() == [[1, 0], [1, 2], [1, 4], [2, 0], [2, 2], [2, 4]]
    assert info(tmp_path) == rebuild(tmp_path)
    assert path.read_bytes() == content


def test_an_unknown_schema_is_reported(tmp_path: Path) -> None:
    path = write_version_1(tmp_path, make_episode(), schema="vla-rl-episode/3")
    with EpisodeStore(tmp_path) as store:
        assert store.select() == []
        assert "schema is 'vla-rl-episode/3', this version reads 'vla-rl-episode/2'" in store.corrupt[path.name]


def test_a_missing_array_is_reported(tmp_path: Path) -> None:
    path = write_version_1(tmp_path, make_episode(), schema="vla-rl-episode/2")  # look_steps in a file of version 2
    with EpisodeStore(tmp_path) as store:
        assert "without observation_steps" in store.corrupt[path.name]
