"""Demonstrations: tasks at which the expert fails are given up."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from episodes.recorder import RecordedEnv, keep_successes
from episodes.store import EpisodeStore
from sims.errors import UserError
from sims.starts import StartSequence
from tests.worlds import PointEnv, PointExpert
from vla_rl.runners.demonstrations import ATTEMPTS_PER_SUCCESS, Attempts, run_expert


class PartialExpert(PointExpert):
    """Does not move in some tasks."""

    failing: tuple[int, ...] = ()

    def act(self) -> Tensor:
        moves = torch.tensor([task not in self.failing for task in self.env.task.tolist()])
        return super().act() * moves[:, None]


def record(failing: tuple[int, ...], path: Path) -> tuple[Attempts, EpisodeStore]:
    world = PointEnv(num_envs=50)
    store = EpisodeStore(path, create=True)
    recorder = RecordedEnv(world, store, source="expert", split="train", keep=keep_successes)
    expert = PartialExpert(world, noise=0.0, generator=torch.Generator())
    expert.failing = failing
    starts = StartSequence("demos", seed=0, num_tasks=3)
    attempts = run_expert(recorder, expert, starts, episodes=400, observe_every=4, on_recorded=lambda count: None)
    return attempts, store


def test_a_task_at_which_the_expert_never_succeeds_is_given_up(tmp_path: Path) -> None:
    attempts, store = record((2,), tmp_path)
    assert attempts.given_up.tolist() == [False, False, True]
    running = 50  # at most, when the task was given up
    assert ATTEMPTS_PER_SUCCESS <= attempts.finished[2] < ATTEMPTS_PER_SUCCESS + running
    assert len(store.select()) == 400 == attempts.succeeded.sum()


def test_an_expert_that_never_succeeds_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"succeeded in 0 of \d+ episodes; lower start.noise"):
        record((0, 1, 2), tmp_path)
