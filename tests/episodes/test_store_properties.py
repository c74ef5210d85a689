"""Any valid episode is read back unchanged, any change of its file is detected, any sampler covers each window once."""

import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from episodes.archive import verify_archive
from episodes.sampler import WindowSampler
from episodes.schema import ACTORS, ARRAYS, OPTIONAL_ARRAYS, SOURCES, CorruptEpisode, Episode
from episodes.store import EpisodeStore

TEXT = st.text(min_size=1, max_size=200)

# With --check-types, beartype looks at an entry of a tuple that it picks at random.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")


@st.composite
def episodes(
    draw,
    action_dim: int | None = None,
    state_dim: int | None = None,
    actors: int = len(ACTORS),
    control_hz: float | None = None,
) -> Episode:
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    steps = draw(st.integers(1, 12))
    observed = np.array(sorted(draw(st.sets(st.integers(1, steps))) | {0}), dtype=np.int32)
    end = draw(st.sampled_from(["terminated", "truncated", "cut off"]))
    last = np.arange(steps) == steps - 1
    cameras = draw(st.lists(st.from_regex(r"[A-Za-z0-9_-]{1,12}", fullmatch=True), max_size=3, unique_by=str.lower))
    size = draw(st.tuples(st.integers(1, 9), st.integers(1, 9)))
    action = random.uniform(-1, 1, (steps, action_dim or draw(st.integers(1, 5)))).astype(np.float32)
    corrected = draw(st.booleans())
    interventions = {
        "shadow_action": -action,
        "intervention": random.integers(-1, 2, steps).astype(np.int32),
        "input_time_s": random.random(steps),
        "applied_time_s": random.random(steps),
        "operators": ("anna", "ben"),
    }
    return Episode(
        images={name: random.integers(0, 256, (len(observed), *size, 3), dtype=np.uint8) for name in cameras},
        observation_steps=observed,
        state=random.normal(size=(len(observed), state_dim or draw(st.integers(1, 5)))).astype(np.float32),
        action=action,
        reward=random.normal(size=steps).astype(np.float32),
        terminated=last & (end == "terminated"),
        truncated=last & (end == "truncated"),
        success=random.random(steps) < 0.3,
        actor=random.integers(0, actors, steps).astype(np.uint8),
        step_policy_version=draw(st.sampled_from([None, np.arange(-1, steps - 1)])),
        instruction=draw(TEXT),
        task=draw(TEXT),
        split=draw(TEXT),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        source=draw(st.sampled_from(SOURCES)),
        control_hz=control_hz or draw(st.floats(0.01, 1e4)),
        action_delay=draw(st.integers(0, 9)),
        policy_version=draw(st.text(max_size=20)),
        fingerprint=draw(st.dictionaries(TEXT, TEXT, max_size=3)),
        **(interventions if corrected else {}),
    )


@given(st.lists(episodes(), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None)
def test_round_trip(recorded):
    with tempfile.TemporaryDirectory() as folder, EpisodeStore(folder, create=True) as store:
        store.add_all(recorded)
        before = store.entries()
        store.rebuild()
        assert store.entries() == before
        for episode in recorded:
            got = store.read(episode.id)
            for name in ARRAYS:
                assert getattr(got, name).dtype == getattr(episode, name).dtype
                np.testing.assert_array_equal(getattr(got, name), getattr(episode, name))
            for name in OPTIONAL_ARRAYS:
                np.testing.assert_array_equal(getattr(got, name), getattr(episode, name))
            assert list(got.images) == list(episode.images)
            for camera, frames in episode.images.items():
                np.testing.assert_array_equal(got.images[camera], frames)
            for name in (
                "instruction",
                "task",
                "split",
                "seed",
                "source",
                "control_hz",
                "action_delay",
                "policy_version",
                "fingerprint",
                "operators",
            ):
                assert getattr(got, name) == getattr(episode, name)


@given(episodes(), st.floats(0, 1, exclude_max=True), st.integers(0, 7), st.booleans())
@settings(max_examples=60, deadline=None)
def test_verify_detects_any_flipped_bit_and_any_truncation(episode, where, bit, truncate):
    with tempfile.TemporaryDirectory() as folder, EpisodeStore(folder, create=True) as store:
        file: Path = store.file(store.add(episode))
        verify_archive(file)
        content = bytearray(file.read_bytes())
        at = int(where * len(content))
        content[at] ^= 1 << bit
        file.write_bytes(content[:at] if truncate else content)
        try:
            verify_archive(file)
        except CorruptEpisode:
            return
        raise AssertionError(f"damage at byte {at} of {len(content)} was not detected")


@given(
    st.lists(episodes(2, 3, len(SOURCES), 20.0), min_size=1, max_size=4),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_an_epoch_has_each_window_once_and_masks_are_prefixes(recorded, batch_size, horizon, seed):
    with tempfile.TemporaryDirectory() as folder, EpisodeStore(folder, create=True) as store:
        store.add_all(recorded)
        sampler = WindowSampler(store, action_horizon=horizon, batch_size=batch_size, seed=seed, cameras=())
        total = sum((episode.observation_steps < episode.num_steps).sum() for episode in recorded)
        assert len(sampler) == total
        batches = [sampler.next_batch() for _ in range(total)]
        states = np.concatenate([batch.obs.state.numpy() for batch in batches])
        for epoch in range(batch_size):
            drawn = states[epoch * total : (epoch + 1) * total]
            expected = np.concatenate([e.state[e.observation_steps < e.num_steps] for e in recorded])
            np.testing.assert_array_equal(*(np.sort(rows.view("f4,f4,f4"), axis=0) for rows in (drawn, expected)))
        for batch in batches:
            assert (batch.targets.mask[:, 0] == 1).all()
            assert (batch.targets.mask[:, :-1] >= batch.targets.mask[:, 1:]).all()
            assert (batch.targets.action.abs() <= 1).all()
