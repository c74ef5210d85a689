"""Episodes as MCAP files, read back by the format's own reader."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mcap.reader import make_reader
from mcap.records import Schema
from mcap_protobuf.decoder import DecoderFactory
from PIL import Image

from episodes.formats.exporter import export_episodes
from episodes.formats.mcap import export_mcap
from episodes.store import EpisodeStore
from tests.episodes.episode_examples import make_episode


def _decoded(schema: Schema, data: bytes) -> Any:
    decode = DecoderFactory().decoder_for("protobuf", schema)
    assert decode is not None
    return decode(data)


def test_an_exported_episode_is_read_back_by_the_formats_reader(tmp_path: Path) -> None:
    times = 1.7e9 + np.array([0.0, 0.05, 0.1, 0.15, 0.2, 0.35])
    episodes = [make_episode(steps=6, every=2), make_episode(steps=6, every=1, seed=1, applied_time_s=times)]
    paths = export_mcap(episodes, tmp_path / "out")
    assert [path.name for path in paths] == [f"{episode.id}.mcap" for episode in episodes]
    for episode, path in zip(episodes, paths, strict=True):
        with path.open("rb") as file:
            reader = make_reader(file)
            messages = [
                (c.topic, m.log_time, json.loads(m.data) if c.message_encoding == "json" else _decoded(schema, m.data))
                for schema, c, m in reader.iter_messages()
            ]
            (metadata,) = reader.iter_metadata()
        steps = [message for topic, _, message in messages if topic == "/step"]
        np.testing.assert_allclose([step["action"] for step in steps], episode.action)
        assert [step["success"] for step in steps] == episode.success.tolist()
        states = [message["state"] for topic, _, message in messages if topic == "/state"]
        np.testing.assert_allclose(states, episode.state)
        for name, images in episode.images.items():
            seen = [message for topic, _, message in messages if topic == f"/camera/{name}"]
            assert len(seen) == len(images)
            image = np.array(Image.open(io.BytesIO(seen[0].data)))
            assert image.shape == images[0].shape
            assert abs(float(image.mean()) - float(images[0].mean())) < 10.0
        assert metadata.metadata["instruction"] == episode.instruction
    at = [time for topic, time, _ in messages if topic == "/step"]
    assert np.diff(at) / 1e9 == pytest.approx(np.diff(times), abs=1e-6)


def test_observations_come_at_their_steps(tmp_path: Path) -> None:
    episode = make_episode(steps=6, every=4)
    (path,) = export_mcap([episode], tmp_path)
    with path.open("rb") as file:
        at = [
            message.log_time for _, channel, message in make_reader(file).iter_messages() if channel.topic == "/state"
        ]
    assert np.array(at) / 1e9 == pytest.approx(episode.observation_steps / episode.control_hz, abs=1e-6)


def test_a_store_is_exported_with_episodes_that_were_observed_at_some_steps_only(tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    episode = make_episode(steps=6, every=4)
    store.add(episode)
    assert export_episodes(store, tmp_path / "out", "mcap") == {"episodes": 1, "steps": 6}
    assert [path.name for path in (tmp_path / "out").iterdir()] == [f"{episode.id}.mcap"]
