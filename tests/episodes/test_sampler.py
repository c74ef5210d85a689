"""Windows contain the recorded data, each once per epoch, and a resumed sampler continues exactly."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from episodes.maintenance import compact
from episodes.sampler import KINDS, PRE_INTERVENTION, WindowSampler, count_windows, mark_pre_intervention
from episodes.schema import EXPERT, HOLD, HUMAN, POLICY, CorruptEpisode, EpisodeError
from episodes.store import EpisodeStore, Selection
from sims.vector_env import decode_instructions
from tests.episodes.episode_examples import make_episode


@pytest.fixture
def store(tmp_path):
    """Episodes 0..9 of 3 to 12 steps, observed every 1 or 2 steps."""
    with EpisodeStore(tmp_path, create=True) as store:
        store.add_all([make_episode(steps=3 + seed, every=1 + seed % 2, seed=seed) for seed in range(10)])
        yield store


def sampler(store, **settings) -> WindowSampler:
    return WindowSampler(store, **{"action_horizon": 4, "batch_size": 7, "seed": 0, **settings})


def keys(batch) -> list[tuple[int, int]]:
    """(episode's seed, step) of every window, which its state contains."""
    return [(int(seed), int(step)) for seed, step in batch.obs.state[:, :2].tolist()]


def test_a_window_contains_the_recorded_data(store):
    every_window = sampler(store)
    batch = every_window.windows(np.arange(len(every_window)))
    for row, (seed, step) in enumerate(keys(batch)):
        steps = 3 + seed
        at = np.minimum(step + np.arange(4), steps - 1)
        assert torch.allclose(batch.targets.action[row, :, 0], torch.from_numpy(at) / 1000)
        assert torch.allclose(batch.targets.action[row, :, 1], torch.tensor(seed / 1000))
        assert batch.targets.mask[row].tolist() == [float(step + i < steps) for i in range(4)]
        assert batch.obs.images[row, 0].unique().tolist() == [step]
        assert batch.obs.images[row, 1].unique().tolist() == [step + 100]
        assert decode_instructions(batch.obs.instruction[row : row + 1]) == [f"do number {seed}"]
    assert batch.obs.images.shape == (len(every_window), 2, 8, 8, 3)


def test_the_future_is_the_last_observation_until_then_and_the_end(store):
    every_window = sampler(store, future_steps=(1, 5))
    batch = every_window.windows(np.arange(len(every_window)))
    for (seed, step), future in zip(keys(batch), batch.targets.future[:, :, :2].tolist(), strict=True):
        steps, every = 3 + seed, 1 + seed % 2
        observed = [*range(0, steps, every), steps]
        expected = [max(at for at in observed if at <= min(step + ahead, steps)) for ahead in (1, 5, steps)]
        assert future == [[seed, at] for at in expected]


def test_the_past_is_the_last_observation_until_then_or_the_first_one(store):
    every_window = sampler(store, past_steps=(5, 2))
    batch = every_window.windows(np.arange(len(every_window)))
    for row, (seed, step) in enumerate(keys(batch)):
        observed = range(0, 4 + seed, 1 + seed % 2)
        expected = [max([0, *(at for at in observed if at <= step - back)]) for back in (5, 2)]
        assert batch.past.state[row, :, :2].tolist() == [[seed, at] for at in expected]
        assert [images.unique().tolist() for images in batch.past.images[row, :, 0]] == [[at] for at in expected]
    assert sampler(store).next_batch().past is None


def test_windows_are_the_observations_followed_by_an_action(store):
    every_window = sampler(store)
    expected = [(seed, step) for seed in range(10) for step in range(0, 3 + seed, 1 + seed % 2)]
    assert keys(every_window.windows(np.arange(len(every_window)))) == expected


def test_each_epoch_has_every_window_once_in_another_order(store):
    shuffled = sampler(store, batch_size=5)
    total = len(shuffled)
    drawn = [key for _ in range(total) for key in keys(shuffled.next_batch())]
    epochs = [drawn[i : i + total] for i in range(0, len(drawn), total)]
    assert len(epochs) == 5
    for epoch in epochs:
        assert sorted(epoch) == sorted(epochs[0])
        assert len(set(epoch)) == total
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_the_order_depends_only_on_the_seed(store):
    a, b, other = sampler(store, seed=1), sampler(store, seed=1), sampler(store, seed=2)
    first = [keys(a.next_batch()) for _ in range(30)]
    assert first == [keys(b.next_batch()) for _ in range(30)]
    assert first != [keys(other.next_batch()) for _ in range(30)]


def test_episodes_that_are_deleted_for_good_meanwhile_are_read_on(store):
    through, undisturbed = sampler(store), sampler(store)
    expected = [undisturbed.next_batch() for _ in range(30)]
    for entry in store.select()[:5]:
        store.delete(entry.id, author="ada")
    assert compact(store.path)["removed"] == 5
    for batch in expected:
        assert torch.equal(through.next_batch().obs.images, batch.obs.images)


def test_files_stay_mapped_but_not_open(store):
    count = len(os.listdir("/proc/self/fd"))
    mapped = sampler(store)
    assert len(os.listdir("/proc/self/fd")) == count
    assert all(str(store.file(entry.id)) in Path("/proc/self/maps").read_text() for entry in store.select())
    assert len(mapped.next_batch().obs.images) == 7


@pytest.mark.parametrize("at", [0, 1, 9, 23])
def test_resume_is_exact(store, at):
    through = sampler(store)
    for _ in range(at):
        through.next_batch()
    resumed = sampler(store)
    resumed.load_state_dict(through.state_dict())
    for _ in range(20):
        a, b = through.next_batch(), resumed.next_batch()
        assert torch.equal(a.obs.images, b.obs.images)
        assert torch.equal(a.targets.action, b.targets.action)
        assert keys(a) == keys(b)


def test_resume_on_other_data_is_refused(store):
    state = sampler(store).state_dict()
    with pytest.raises(EpisodeError, match="seed was 0, now it is 3"):
        sampler(store, seed=3).load_state_dict(state)
    store.add(make_episode(seed=11))
    with pytest.raises(EpisodeError, match="windows was"):
        sampler(store).load_state_dict(state)


def test_chunks_end_where_another_actor_takes_over(tmp_path):
    actor = np.array([POLICY, POLICY, POLICY, HUMAN, HUMAN, POLICY], dtype=np.uint8)
    with EpisodeStore(tmp_path, create=True) as store:
        store.add_all([make_episode(source="policy", actor=actor), make_episode(seed=1)])
        first = sampler(store, future_steps=(1,)).windows(np.arange(6))
        assert first.targets.future[:, :, 1].tolist() == [[1, 3], [2, 3], [3, 3], [4, 5], [5, 5], [6, 6]]
        assert first.targets.mask.sum(-1).tolist() == [3, 2, 1, 2, 1, 1]
        assert torch.allclose(first.targets.action[2, :, 0], torch.tensor(0.002))
        human = sampler(store, actors=("human",))
        assert keys(human.windows(np.arange(len(human)))) == [(0, 3), (0, 4)]
        assert EXPERT not in actor
        with pytest.raises(EpisodeError, match="allowed are expert, policy, human"):
            sampler(store, actors=("robot",))


def test_selection_and_deletion(store):
    assert {seed for seed, _ in keys(sampler(store, where=Selection(tasks=("push",))).next_batch())} <= set(range(10))
    with pytest.raises(EpisodeError, match="no episode matches"):
        sampler(store, where=Selection(tasks=("lift",)))
    entries = store.select()
    for entry in entries[1:]:
        store.delete(entry.id, author="ada")
    alone = sampler(store)
    assert len(alone) == 3
    assert {seed for seed, _ in keys(alone.next_batch())} == {0}


def test_cameras_are_chosen_and_ordered(store):
    batch = sampler(store, cameras=("wrist", "front")).next_batch()
    assert torch.equal(batch.obs.images[:, 0], batch.obs.images[:, 1] + 100)
    assert sampler(store, cameras=("wrist",)).next_batch().obs.images.shape == (7, 1, 8, 8, 3)
    with pytest.raises(EpisodeError, match="no camera 'top'; recorded are front, wrist"):
        sampler(store, cameras=("top",))


def test_episodes_without_cameras(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        store.add(make_episode(images={}))
        assert sampler(store).next_batch().obs.images.shape == (7, 0, 0, 0, 3)


def test_statistics_contain_all_states_and_actions(store):
    state, action = sampler(store).statistics()
    assert action.shape == (sum(3 + seed for seed in range(10)), 3)
    assert state.shape == (sum(entry.observations for entry in store.select()), 4)
    assert sorted(set(state[:, 0].tolist())) == list(range(10))


def test_other_robots_and_damaged_files_are_reported(store):
    other = store.add(make_episode(seed=20, action=np.zeros((6, 5), np.float32)))
    with pytest.raises(EpisodeError, match=rf"{other}.*action dimensions 5, but 3 expected"):
        sampler(store)
    store.delete(other, author="ada")
    faster = store.add(make_episode(seed=21, control_hz=50.0))
    with pytest.raises(EpisodeError, match=rf"{faster}.*control rate 50.0, but 20.0 expected"):
        sampler(store)
    store.delete(faster, author="ada")
    entry = store.select()[4]
    store.file(entry.id).write_bytes(store.file(entry.id).read_bytes()[:-1000])
    with pytest.raises(CorruptEpisode, match=rf"{entry.id}.*vla-rl data verify"):
        sampler(store)


def test_instructions_have_any_length(store):
    long = "push the red block " * 20
    store.add(make_episode(seed=30, instruction=long))
    every_window = sampler(store)
    batch = every_window.windows(np.arange(len(every_window)))
    for instruction, (seed, _) in zip(decode_instructions(batch.obs.instruction), keys(batch), strict=True):
        assert instruction == (long if seed == 30 else f"do number {seed}")


def test_steps_on_hold_are_never_learned_from(tmp_path):
    actor = np.array([POLICY, POLICY, HUMAN, HOLD, HOLD, HUMAN], dtype=np.uint8)
    with EpisodeStore(tmp_path / "held", create=True) as store:
        store.add(make_episode(actor=actor))
        assert sorted(step for _, step in keys(sampler(store, batch_size=4).next_batch())) == [0, 1, 2, 5]
        human = sampler(store, batch_size=2, actors=("human",)).next_batch()
        assert dict(zip([step for _, step in keys(human)], human.targets.mask.sum(1).tolist(), strict=True)) == {
            2: 1,
            5: 1,
        }
        with pytest.raises(EpisodeError, match="allowed are expert, policy, human"):
            sampler(store, actors=("hold",))


def test_a_policy_is_not_itself_before_a_person_takes_over(tmp_path):
    actor = np.array([POLICY] * 5 + [HUMAN] * 2 + [POLICY, HOLD, HUMAN, POLICY], dtype=np.uint8)
    before = KINDS.index(PRE_INTERVENTION)
    marked = [POLICY, POLICY, *[before] * 3, HUMAN, HUMAN, before, HOLD, HUMAN, POLICY]
    assert mark_pre_intervention(actor, 3).tolist() == marked
    assert mark_pre_intervention(actor, 0).tolist() == actor.tolist()
    with EpisodeStore(tmp_path, create=True) as store:
        store.add(make_episode(steps=11, actor=actor))
        chosen = {"actors": ("policy",), "pre_intervention_steps": 3}
        own = sampler(store, **chosen)
        batch = own.windows(np.arange(len(own)))
        assert [step for _, step in keys(batch)] == [0, 1, 10]
        assert batch.targets.mask[0].tolist() == [1, 1, 0, 0]  # a chunk ends where what was corrected begins
        assert count_windows(store, **chosen) == 3
        assert count_windows(store) == 10  # all but the hold


def test_a_cut_before_a_person_takes_over_makes_nothing_of_the_policy_s_own(tmp_path):
    actor = np.array([POLICY] * 8 + [HUMAN] * 4, dtype=np.uint8)
    chosen = {"actors": ("policy",), "pre_intervention_steps": 3}
    with EpisodeStore(tmp_path, create=True) as store:
        id = store.add(make_episode(steps=12, actor=actor))
        for at in (8, 7):
            store.split(id, at, author="anna")
            own = sampler(store, **chosen)
            assert [step for _, step in keys(own.windows(np.arange(len(own))))] == [0, 1, 2, 3, 4]
            assert count_windows(store, **chosen) == 5
            store.undo(id, author="anna")
