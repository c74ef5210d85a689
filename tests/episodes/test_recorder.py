"""The store holds exactly what happened in a RecordedEnv."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from episodes.recorder import RecordedEnv, keep_successes
from episodes.schema import HUMAN, POLICY, EpisodeError, InvalidEpisode
from episodes.store import EpisodeStore
from sims.chunk import step_chunk
from sims.subproc.vector_env import SubprocVectorEnv
from sims.vector_env import EnvSpec, Observation, StartState, Step, encode_instructions
from tests.sims.counting import Counting, CountingConfig
from tests.sims.killed_once import KilledOnce


class CountingEnv:
    """Every environment counts its steps; images and state contain seed and count.

    An episode ends after seed steps, successful if seed is even, and at the latest after ``max_steps``. A person
    intervenes at step 1. Buffers are reused.
    """

    def __init__(self, num_envs: int):
        self.spec = EnvSpec(
            name="counting", num_envs=num_envs, action_dim=2, state_dim=2, cameras=("front", "wrist"),
            image_size=(4, 4), control_hz=10.0, max_steps=9, tasks=("wait", "hurry"), device=torch.device("cpu"),
            fingerprint={"v": "1"},
        )  # fmt: skip
        self.starts = [StartState(task=0, seed=0)] * num_envs
        self.count = torch.zeros(num_envs, dtype=torch.int64)
        self._images = torch.zeros(num_envs, 2, 4, 4, 3, dtype=torch.uint8)
        self._reward = torch.zeros(num_envs)

    def _flags(self) -> tuple[Tensor, Tensor]:
        seed = torch.tensor([start.seed for start in self.starts])
        success = (self.count >= seed) & (seed % 2 == 0)
        return success, ~success & ((self.count >= seed) | (self.count >= self.spec.max_steps))

    def reset(self, env_ids: Sequence[int] | None = None, *, start: Sequence[StartState]) -> None:
        for env_id, state in zip(self.spec.ids(env_ids), start, strict=True):
            self.starts[env_id], self.count[env_id] = state, 0

    def step(self, action: Tensor) -> Step:
        success, truncated = self._flags()
        moving = ~(success | truncated)
        self.count += moving
        success, truncated = self._flags()
        self._reward.copy_(self.count * moving)
        return Step(
            reward=self._reward, terminated=success, truncated=truncated, success=success,
            intervened=moving & (self.count == 2),
        )  # fmt: skip

    def observe(self, env_ids: Sequence[int] | None = None) -> Observation:
        ids = self.spec.ids(env_ids)
        seed = torch.tensor([self.starts[env_id].seed for env_id in ids])
        self._images[: len(ids), 0] = self.count[ids].to(torch.uint8)[:, None, None, None]
        self._images[: len(ids), 1] = seed.to(torch.uint8)[:, None, None, None]
        state = torch.stack([seed, self.count[ids]], -1).float()
        return Observation(
            images=self._images[: len(ids)],
            state=state,
            instruction=encode_instructions([f"wait {s}" for s in seed.tolist()]),
        )

    def capture(self, env_ids: Sequence[int] | None = None) -> tuple[StartState, ...]:
        raise NotImplementedError

    def close(self) -> None: ...


def record(store: EpisodeStore, seeds: list[int], *, chunk: int, num_envs: int, **settings) -> RecordedEnv:
    """Run episodes with these seeds, observed every ``chunk`` steps; environments restart when their episode ends."""
    env = RecordedEnv(CountingEnv(num_envs), store, **{"source": "policy", "split": "train", **settings})
    waiting = [StartState(task=seed % 2, seed=seed) for seed in seeds]
    running = list(range(num_envs))
    env.reset(start=[waiting.pop(0) for _ in running])
    obs = env.observe()
    while running:
        action = torch.full((num_envs, chunk, 2), 0.5)
        action[..., 1] = obs.state[:, :1] / 100
        done = step_chunk(env, action, gamma=1.0).done
        obs = env.observe()
        restart = [env_id for env_id in running if done[env_id]]
        running = [env_id for env_id in running if not done[env_id] or waiting]
        for env_id in restart:
            if waiting:
                env.reset([env_id], start=[waiting.pop(0)])
        obs = env.observe()
    env.close()
    return env


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("num_envs", [1, 4])
def test_every_episode_is_recorded_exactly(tmp_path, chunk, num_envs):
    seeds = [4, 7, 2, 20, 5, 6, 3, 8, 4]
    with EpisodeStore(tmp_path, create=True) as store:
        env = record(store, seeds, chunk=chunk, num_envs=num_envs, policy_version="run/7")
        episodes = [store.read(entry.id) for entry in store.select()]
    assert sorted(episode.seed for episode in episodes) == sorted(seeds)
    assert env.recorded == env.ended == len(seeds)
    for episode in episodes:
        steps = min(episode.seed, 9)
        observed = [*range(0, steps, chunk), steps]
        assert episode.num_steps == steps
        assert episode.observation_steps.tolist() == observed
        assert episode.state.tolist() == [[episode.seed, step] for step in observed]
        assert (episode.images["front"] == np.array(observed)[:, None, None, None]).all()
        assert (episode.images["wrist"] == episode.seed).all()
        assert episode.reward.tolist() == list(range(1, steps + 1))
        np.testing.assert_array_equal(episode.action, np.float32([[0.5, episode.seed / 100]] * steps))
        assert episode.succeeded == (episode.seed % 2 == 0 and episode.seed < 9)
        assert episode.terminated[-1] == episode.succeeded
        assert episode.truncated[-1] != episode.succeeded
        assert episode.actor.tolist() == [HUMAN if t == 1 else POLICY for t in range(steps)]
        assert (episode.instruction, episode.task) == (f"wait {episode.seed}", ("wait", "hurry")[episode.seed % 2])
        assert (episode.source, episode.policy_version, episode.control_hz) == ("policy", "run/7", 10.0)
        assert episode.fingerprint == {"environment": "counting", "v": "1"}


def test_only_successes_are_kept(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        env = record(store, [4, 7, 2, 20], chunk=2, num_envs=2, keep=keep_successes)
        assert sorted(entry.seed for entry in store.select()) == [2, 4]
        assert (env.recorded, env.ended) == (2, 4)


def test_an_unfinished_episode_is_dropped_and_an_end_without_observation_is_committed_at_reset(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        env = RecordedEnv(CountingEnv(2), store, source="policy", split="train")
        env.reset(start=[StartState(task=0, seed=3), StartState(task=0, seed=6)])
        env.observe()
        for _ in range(3):
            env.step(torch.zeros(2, 2))
        env.reset(start=[StartState(task=0, seed=5), StartState(task=0, seed=5)])
        env.close()
        (entry,) = store.select()
        assert (entry.seed, entry.steps, entry.observations) == (3, 3, 1)


def test_the_episode_of_a_crashed_simulator_is_dropped(tmp_path):
    """The other environment's is recorded, and so is the same start when it is run again."""
    pool = SubprocVectorEnv(CountingConfig(num_envs=2), Counting)
    first, second = StartState(task=0, seed=1), StartState(task=0, seed=2)
    action = torch.tensor([[1.0, 0.0]]).expand(2, 2)
    with EpisodeStore(tmp_path, create=True) as store:
        env = RecordedEnv(KilledOnce(pool, at=2), store, source="policy", split="train")
        env.reset(start=[first, second])
        valid = []
        for _ in range(5):
            env.observe()
            valid.append(env.step(action).valid.tolist())
        assert valid == [[True, True]] * 2 + [[False, True]] * 3
        env.reset([0], start=[first])
        for _ in range(5):
            env.observe()
            env.step(action)
        env.observe()
        env.close()
        episodes = [store.read(entry.id) for entry in store.select()]
    assert env.recorded == env.ended == 2
    assert [episode.seed for episode in episodes] == [2, 1]
    for episode in episodes:
        assert episode.succeeded
        assert episode.observation_steps.tolist() == list(range(episode.num_steps + 1))


def test_wrong_use_is_reported(tmp_path):
    with EpisodeStore(tmp_path, create=True) as store:
        with pytest.raises(EpisodeError, match="allowed are expert, policy, human"):
            RecordedEnv(CountingEnv(1), store, source="robot", split="train")
        env = RecordedEnv(CountingEnv(1), store, source="policy", split="train")
        env.reset(start=[StartState(task=0, seed=1)])
        env.step(torch.zeros(1, 2))
        with pytest.raises(EpisodeError, match="never observed"):
            env.commit()
        env.reset(start=[StartState(task=0, seed=1)])
        env.observe()
        env.step(torch.full((1, 2), torch.nan))
        with pytest.raises(InvalidEpisode, match=r"action\[0, 0\] \(step 0, dimension 0\) is nan"):
            env.observe()
        assert store.select() == []
