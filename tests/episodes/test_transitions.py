"""Import of D4RL and Minari files, generated here in the documented layouts."""

from pathlib import Path

import h5py
import numpy as np
import pytest

from episodes.formats.importer import import_episodes
from episodes.formats.recording import ImportMapping
from episodes.schema import Episode, EpisodeError
from episodes.store import EpisodeStore
from vla_rl.replay.demonstrations import chunk_sequences

RNG = np.random.default_rng(0)
LENGTHS, TERMINATED = (4, 3), (True, False)  # the second one runs out of time
STATES = [RNG.normal(size=(length + 1, 3)).astype(np.float32) for length in LENGTHS]
ACTIONS = [RNG.uniform(-2, 2, (length, 1)).astype(np.float32) for length in LENGTHS]
REWARDS = [RNG.normal(size=length).astype(np.float32) for length in LENGTHS]


def d4rl(path: Path, *, successors: bool = True) -> Path:
    """With two transitions more that are cut off."""
    ends = [np.eye(1, length, length - 1)[0].astype(bool) for length in LENGTHS]
    cut = np.zeros(2, bool)
    with h5py.File(path, "w") as file:
        file["observations"] = np.concatenate([*(states[:-1] for states in STATES), STATES[0][:2]])
        file["actions"] = np.concatenate([*ACTIONS, ACTIONS[0][:2]])
        file["rewards"] = np.concatenate([*REWARDS, REWARDS[0][:2]])
        file["terminals"] = np.concatenate([*(end & ended for end, ended in zip(ends, TERMINATED, strict=True)), cut])
        file["timeouts"] = np.concatenate(
            [*(end & (not ended) for end, ended in zip(ends, TERMINATED, strict=True)), cut]
        )
        if successors:
            file["next_observations"] = np.concatenate([*(states[1:] for states in STATES), STATES[0][1:3]])
    return path


def minari(folder: Path, *, nested: bool = False) -> Path:
    (folder / "data").mkdir(parents=True)
    with h5py.File(folder / "data" / "main_data.hdf5", "w") as file:
        for number in (1, 0):
            group, ended = file.create_group(f"episode_{number}"), np.zeros(LENGTHS[number], bool)
            ended[-1] = True
            for key, part in ("arm/q", STATES[number][:, :2]), ("goal", STATES[number][:, 2:]):
                if nested:
                    group[f"observations/{key}"] = part
            if not nested:
                group["observations"] = STATES[number]
            group["actions"], group["rewards"] = ACTIONS[number], REWARDS[number]
            group["terminations"], group["truncations"] = ended & TERMINATED[number], ended & (not TERMINATED[number])
    return folder


def imported(source: Path, folder: Path, *state: str) -> list[Episode]:
    mapping = ImportMapping(
        state=state or ("observations",), instruction="swing up", control_hz=20, action_low=(-2,), action_high=(2,),
        success="none",
    )  # fmt: skip
    store = EpisodeStore(folder, create=True)
    import_episodes(source, store, mapping)
    return [store.read(entry.id) for entry in store.select()]


@pytest.mark.parametrize("layout", ["d4rl", "minari", "nested"])
def test_episodes_are_as_recorded(layout: str, tmp_path: Path) -> None:
    keys = ("observations/arm/q", "observations/goal") if layout == "nested" else ()
    source = d4rl(tmp_path / "flat.hdf5") if layout == "d4rl" else minari(tmp_path / "set", nested=layout == "nested")
    episodes = imported(source, tmp_path / "store", *keys)
    assert [episode.num_steps for episode in episodes] == list(LENGTHS)
    for index, episode in enumerate(episodes):
        np.testing.assert_array_equal(episode.state, STATES[index])
        np.testing.assert_allclose(episode.action, ACTIONS[index] / 2, atol=1e-6)
        np.testing.assert_array_equal(episode.reward, REWARDS[index])
        assert bool(episode.terminated[-1]) is TERMINATED[index] is not bool(episode.truncated[-1])
        (chunks,) = chunk_sequences(episode, action_horizon=1, gamma=0.9)  # what follows the end in a replay
        assert len(chunks) == LENGTHS[index] + (not TERMINATED[index])


def test_without_a_successor_the_last_observation_ends_the_episode(tmp_path: Path) -> None:
    episodes = imported(d4rl(tmp_path / "flat.hdf5", successors=False), tmp_path / "store")
    assert [episode.num_steps for episode in episodes] == [length - 1 for length in LENGTHS]
    np.testing.assert_array_equal(episodes[0].state, STATES[0][:-1])
    np.testing.assert_allclose(episodes[0].reward.sum(), REWARDS[0].sum(), rtol=1e-6)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    path = d4rl(tmp_path / "flat.hdf5")
    with h5py.File(path, "a") as file:
        del file["rewards"]
    with pytest.raises(EpisodeError, match=r"flat.hdf5 has no rewards, which D4RL's layout has"):
        imported(path, tmp_path / "store")


def test_discrete_actions_and_a_state_of_text_are_named(tmp_path: Path) -> None:
    path = minari(tmp_path / "set", nested=True)
    (file_path,) = path.rglob("*.hdf5")
    with h5py.File(file_path, "a") as file:
        file["episode_0/observations/mission"] = np.array([b"go"] * len(STATES[0]))
    with pytest.raises(EpisodeError, match=r"'observations/mission' is \|S2; --state needs keys of numbers"):
        imported(path, tmp_path / "text", "observations/mission")
    with h5py.File(file_path, "a") as file:
        del file["episode_0/actions"]
        file["episode_0/actions"] = np.zeros(LENGTHS[0], dtype=np.int64)
    with pytest.raises(EpisodeError, match=r"episode_0: its actions are int64 \[4\], not numbers \[T, action_dim\]"):
        imported(path, tmp_path / "discrete", "observations/goal")
