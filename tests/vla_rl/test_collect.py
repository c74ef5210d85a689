"""Demonstrations: tasks at which the expert fails are given up."""

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

from episodes.recorder import RecordedEnv, keep_successes
from episodes.schema import EpisodeError
from episodes.store import EpisodeStore
from policies.bundle import bundle_version, save_bundle
from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from policies.policy import RobotSpec
from sims.errors import UserError
from sims.starts import StartSequence
from sims.subproc.vector_env import SubprocVectorEnv
from sims.tabletop.config import TabletopConfig
from sims.vector_env import Observation, StartState
from tests.sims.counting import FAULT_SEED, Counting, CountingConfig
from tests.sims.killed_once import KilledOnce
from tests.worlds import PointEnv, PointExpert
from vla_rl.config.experiment import Experiment, Imitation
from vla_rl.runners.demonstrations import (
    ATTEMPTS_PER_SUCCESS,
    Attempts,
    collect,
    demonstrate,
    record_policy,
    run_expert,
)
from vla_rl.runners.evaluate import run_episodes


class PartialExpert(PointExpert):
    """Does not move in some tasks."""

    failing: tuple[int, ...] = ()

    def act(self) -> Tensor:
        moves = torch.tensor([task not in self.failing for task in self.env.task.tolist()])
        return super().act() * moves[:, None]


def record(failing: tuple[int, ...], path: Path, *, share: int | None = None) -> tuple[Attempts, EpisodeStore]:
    world = PointEnv(num_envs=50)
    store = EpisodeStore(path, create=True)
    recorder = RecordedEnv(world, store, source="expert", split="train", keep=keep_successes)
    expert = PartialExpert(world, noise=0.0, generator=torch.Generator())
    expert.failing = failing
    starts, attempts = StartSequence("demos", seed=0, num_tasks=3), Attempts(3, share=share)
    run_expert(recorder, expert, starts, attempts, episodes=400, observe_every=4, on_recorded=lambda count: None)
    return attempts, store


@pytest.mark.parametrize(("share", "succeeded"), [(None, 400), (400, 267)])
def test_a_task_at_which_the_expert_never_succeeds_is_given_up(
    tmp_path: Path, share: int | None, succeeded: int
) -> None:
    """Its share of the episodes is not recorded; without shares the other tasks have more."""
    attempts, store = record((2,), tmp_path, share=share)
    assert attempts.given_up.tolist() == [False, False, True]
    running = 50  # at most, when the task was given up
    assert ATTEMPTS_PER_SUCCESS <= attempts.finished[2] < ATTEMPTS_PER_SUCCESS + running
    assert len(store.select()) == succeeded == attempts.succeeded.sum()


def test_every_task_gets_the_same_number_of_demonstrations(tmp_path: Path) -> None:
    attempts, store = record((), tmp_path, share=400)
    assert attempts.succeeded.tolist() == [134, 133, 133]
    assert len(store.select()) == 400


def test_an_expert_that_never_succeeds_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"succeeded in 0 of \d+ episodes; lower start.noise"):
        record((0, 1, 2), tmp_path)


def test_a_task_without_demonstrations_is_an_error_unless_it_may_be_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = PointEnv(num_envs=50)
    expert = PartialExpert(world, noise=0.0, generator=torch.Generator())
    expert.failing = (1,)
    monkeypatch.setattr(world, "expert", lambda *, noise, seed: expert)
    store = EpisodeStore(tmp_path, create=True)
    with pytest.raises(UserError, match=r"too few demonstrations of .* \(0 of \d+ attempts succeeded\); lower"):
        demonstrate(Experiment(), world, store, episodes=30)
    allowed = Experiment(start=Imitation(missing_tasks="skip"))
    result = demonstrate(allowed, world, store, episodes=30)
    assert [counts["episodes"] for counts in result["per_task"].values()] == [10, 0, 10]


def test_fewer_demonstrations_than_tasks_are_refused_before_any_is_recorded(tmp_path: Path) -> None:
    experiment = Experiment(sim=TabletopConfig(tasks=("reach", "push"), num_envs=1))
    with pytest.raises(UserError, match=r"^--episodes must be at least 2, one for each task of sim, got 1$"):
        collect(experiment, episodes=1, out=tmp_path / "demos")
    assert not (tmp_path / "demos").exists()


def test_episodes_are_not_recorded_into_a_folder_of_other_files(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    experiment = Experiment(sim=TabletopConfig(tasks=("reach",), num_envs=1))
    with pytest.raises(EpisodeError, match=r"is not an episode store: .*, but config.yaml; choose a new folder"):
        collect(experiment, episodes=1, out=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


def test_failed_demonstrations_are_kept_where_they_are_asked_for(tmp_path: Path) -> None:
    experiment = Experiment(start=Imitation(noise=2.0, missing_tasks="skip"))
    with EpisodeStore(tmp_path, create=True) as store:
        result = demonstrate(experiment, PointEnv(num_envs=4), store, episodes=30, failures=True)
        entries = store.select()
    succeeded = sum(counts["episodes"] for counts in result["per_task"].values())
    assert result["episodes"] == result["attempts"] == len(entries) == 30
    assert 0 < succeeded == sum(entry.success for entry in entries) < 30


def test_failed_demonstrations_of_a_task_without_a_success_are_kept_without_an_error(tmp_path: Path) -> None:
    sim = TabletopConfig(tasks=("reach",), num_envs=2, cameras=(), max_steps=4)
    result = collect(Experiment(sim=sim), episodes=2, out=tmp_path / "store", failures=True)
    assert result == {"episodes": 2, "attempts": 2, "per_task": {"reach": {"episodes": 0, "attempts": 2}}}


@pytest.mark.parametrize("reward", ["sparse", "shaped"])
def test_episodes_say_with_which_reward_they_were_recorded(tmp_path: Path, reward: Literal["sparse", "shaped"]) -> None:
    sim = TabletopConfig(tasks=("reach",), num_envs=1, cameras=(), max_steps=4, reward=reward)
    experiment = Experiment(sim=sim, start=Imitation(missing_tasks="skip"))
    collect(experiment, episodes=1, out=tmp_path / "store", failures=True)
    with EpisodeStore(tmp_path / "store") as store:
        (entry,) = store.select()
        assert store.fingerprint(entry).get("reward", "sparse") == reward


def test_episodes_of_a_policy_are_recorded_whether_they_succeed_or_not(tmp_path: Path) -> None:
    env = PointEnv(num_envs=4, max_steps=16)
    torch.manual_seed(0)
    policy = GaussianPolicy(GaussianPolicyConfig(action_horizon=4), RobotSpec.of(env.spec))
    save_bundle(policy, tmp_path / "bundle")
    with EpisodeStore(tmp_path / "store", create=True) as store:
        for count in (6, 3):
            record_policy(Experiment(device="cpu"), env, store, tmp_path / "bundle", episodes=count)
        entries = store.select()
        episode = store.read(entries[0].id)
    assert len(entries) == len({entry.seed for entry in entries}) == 9
    assert {entry.source for entry in entries} == {"policy"}
    assert {entry.policy_version for entry in entries} == {bundle_version(tmp_path / "bundle")}
    assert episode.observation_steps.tolist() == list(range(episode.num_steps + 1))  # as start.observe_every says


def test_no_start_is_recorded_twice(tmp_path: Path) -> None:
    """With an expert that often fails, so that more starts are used than episodes are kept."""
    world = PointEnv(num_envs=4)
    experiment = Experiment(start=Imitation(noise=2.0, missing_tasks="skip", equal_shares=False))
    store = EpisodeStore(tmp_path, create=True)
    attempts = sum(demonstrate(experiment, world, store, episodes=10)["attempts"] for _ in range(4))
    seeds = [entry.seed for entry in store.select()]
    assert attempts > len(seeds) == len(set(seeds)) == 40


def test_a_crashed_simulator_is_no_attempt_of_the_expert(tmp_path: Path) -> None:
    """Its start runs again, so every start of the stream is recorded once, as without the crash."""
    pool = SubprocVectorEnv(CountingConfig(num_envs=2, goal=4.0), Counting)
    store = EpisodeStore(tmp_path, create=True)
    recorder = RecordedEnv(KilledOnce(pool, at=2), store, source="expert", split="train")
    starts, attempts = StartSequence("demos", seed=0, num_tasks=1), Attempts(1)
    expert = pool.expert(noise=0.0, seed=0)
    run_expert(recorder, expert, starts, attempts, episodes=4, observe_every=2, on_recorded=lambda count: None)
    recorder.close()
    episodes = [store.read(entry.id) for entry in store.select()]
    assert attempts.finished.tolist() == attempts.succeeded.tolist() == [4]
    expected = StartSequence("demos", seed=0, num_tasks=1).take(4)
    assert sorted(episode.seed for episode in episodes) == sorted(start.seed for start in expected)
    for episode in episodes:
        assert episode.succeeded
        assert episode.observation_steps.tolist() == [*range(0, episode.num_steps, 2), episode.num_steps]


def test_a_start_that_always_crashes_the_simulator_ends_the_run(tmp_path: Path) -> None:
    """Although other chunks are completed in between, which the pool takes for a simulator that works."""
    with closing(SubprocVectorEnv(CountingConfig(fault="raise", goal=1e9), Counting)) as pool:
        with pytest.raises(UserError, match=f"failed 4 times in the episode of task 0 with seed {FAULT_SEED + 9}"):
            run_episodes(pool, StandStill(), [CRASHES])
        recorder = RecordedEnv(pool, EpisodeStore(tmp_path, create=True), source="expert", split="train")
        expert, starts = pool.expert(noise=0.0, seed=0), Crashing("demos", seed=0, num_tasks=1)
        with pytest.raises(UserError, match="failed 4 times"):
            run_expert(
                recorder, expert, starts, Attempts(1), episodes=1, observe_every=2, on_recorded=lambda count: None
            )


CRASHES = StartState(task=0, seed=FAULT_SEED + 9)


class Crashing(StartSequence):
    def take(self, count: int) -> list[StartState]:
        return [CRASHES] * count


class StandStill:
    """Chunks of four steps."""

    def begin(self, rows: Sequence[int]) -> None: ...

    def __call__(self, obs: Observation, rows: Sequence[int]) -> Tensor:
        return torch.zeros(len(rows), 4, 2)
