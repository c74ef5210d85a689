"""Demonstrations: which tasks the expert goes on trying."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from episodes.recorder import RecordedEnv, keep_successes
from episodes.store import EpisodeStore
from sims.errors import UserError
from sims.starts import StartSequence
from tests.worlds import PointEnv, PointExpert
from vla_rl.runners.demonstrations import Tries, run_expert


class LameExpert(PointExpert):
    """Does not move in the tasks named."""

    lame: tuple[int, ...] = ()

    def act(self) -> Tensor:
        moves = torch.tensor([task not in self.lame for task in self.env.task.tolist()])
        return super().act() * moves[:, None]


def record(lame: tuple[int, ...], path: Path) -> tuple[Tries, EpisodeStore]:
    world = PointEnv(num_envs=50)
    store = EpisodeStore(path, create=True)
    recorder = RecordedEnv(world, store, source="expert", split="train", keep=keep_successes)
    expert = LameExpert(world, noise=0.0, generator=torch.Generator())
    expert.lame = lame
    starts = StartSequence("demos", seed=0, num_tasks=3)
    tries = run_expert(recorder, expert, starts, episodes=400, observe_every=4, on_recorded=lambda count: None)
    return tries, store


def test_a_task_at_which_the_expert_never_succeeds_is_given_up_and_the_others_are_recorded(tmp_path: Path) -> None:
    tries, store = record((2,), tmp_path)
    assert tries.hopeless.tolist() == [False, False, True]
    assert Tries.ENOUGH <= tries.ended[2] < Tries.ENOUGH + 50  # those under way when it was given up
    assert len(store.select()) == 400 == tries.won.sum()


def test_an_expert_that_succeeds_at_nothing_is_an_error_that_says_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"succeeded in 0 of \d+ tries; lower start.noise"):
        record((0, 1, 2), tmp_path)
