"""What the controls of an evaluation change, and intervals over seeds."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from sims.numbers.statistics import seeds_interval, wilson_interval
from sims.starts import StartSequence
from sims.vector_env import Observation, StartState
from tests.worlds import PointEnv
from vla_rl.config.controls import CONTROLS, Control
from vla_rl.runners.controls import make_change, why_not
from vla_rl.runners.evaluate import run_episodes

OBS = Observation(
    images=torch.arange(4 * 2 * 3, dtype=torch.uint8).reshape(4, 2, 1, 1, 3),
    state=torch.ones(4, 5),
    instruction=PointEnv(num_envs=1).instructions[[0, 1, 2, 1]],
)
PARTS = ("images", "state", "instruction")


def changed(control: Control) -> Observation:
    """``OBS`` in episodes of all tasks of PointEnv."""
    starts = [StartState(task=task, seed=0) for task in range(3)]
    return make_change(control, PointEnv(num_envs=2), starts, torch.Generator().manual_seed(0))(OBS)


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_changes_one_part(control: Control) -> None:
    obs = changed(control)
    different = {part for part in PARTS if not torch.equal(getattr(obs, part), getattr(OBS, part))}
    kind, part = control.split("_")
    assert different == {{"cameras": "images"}.get(part, part)}
    if kind == "blank":
        assert not getattr(obs, part).any()


def test_none_changes_nothing() -> None:
    assert changed("none") is OBS


def test_a_shuffled_instruction_is_a_different_one_of_the_episodes() -> None:
    given = changed("shuffled_instruction").instruction
    assert (given != OBS.instruction).any(1).all()
    assert {bytes(row) for row in given.numpy()} <= {bytes(row) for row in OBS.instruction.numpy()}


@pytest.mark.parametrize("num_envs", [1, 2, 8])
def test_who_follows_a_shuffled_instruction_fails(num_envs: int) -> None:
    """In episodes of two tasks, whichever run beside each other, and while the last one runs alone."""
    env = PointEnv(num_envs=num_envs)
    starts = [start for start in StartSequence("evaluation", seed=0, num_tasks=3).take(60) if start.task < 2]
    for control, least, most in (("none", 0.9, 1.0), ("shuffled_instruction", 0.0, 0.2)):
        result = run_episodes(env, Follower(env, control, starts), starts)
        assert least <= result.success.float().mean() <= most


class Follower:
    """Goes to the square that the instruction names."""

    def __init__(self, env: PointEnv, control: Control, starts: Sequence[StartState]) -> None:
        self.env, self.change = env, make_change(control, env, starts, torch.Generator().manual_seed(0))

    def begin(self, env_ids: Sequence[int]) -> None: ...

    def __call__(self, obs: Observation, env_ids: Sequence[int]) -> Tensor:
        ids, env = torch.tensor(env_ids), self.env
        named = (self.change(obs).instruction[:, None] == env.instructions).all(-1).long().argmax(1)
        way = (env.squares[ids, named] - env.point[ids]) / 0.1
        return (way / way.norm(dim=-1, keepdim=True).clamp(min=1))[:, None].repeat(1, 2, 1)


def test_swapped_cameras_are_in_reverse_order() -> None:
    assert torch.equal(changed("swapped_cameras").images[:, 0], OBS.images[:, 1])


def test_a_control_that_would_change_nothing_says_why() -> None:
    env = PointEnv(num_envs=2)
    one, two = ([StartState(task=task, seed=i) for i, task in enumerate(tasks)] for tasks in ((1, 1, 1), (1, 1, 0)))
    assert why_not("swapped_cameras", env, two) == "one camera"
    assert why_not("shuffled_instruction", env, one) == "one instruction"
    assert why_not("shuffled_instruction", env, two) == ""  # not in the same batch of environments, at first
    assert why_not("shuffled_instruction", PointEnv(num_envs=1), two) == ""
    assert not any(why_not(control, env, one) for control in CONTROLS if control.startswith("blank"))


def test_the_interval_over_seeds_covers_both_sources_of_chance() -> None:
    """Of equal seeds it is that of all their episodes; of unequal ones it is as wide as the seeds differ."""
    low, high = seeds_interval([90, 90, 90], [100, 100, 100])
    assert low == pytest.approx(0.9 - 1.96 * (0.9 * 0.1 / 300) ** 0.5, abs=0.006)
    assert high == pytest.approx(0.9 + 1.96 * (0.9 * 0.1 / 300) ** 0.5, abs=0.006)
    low, high = seeds_interval([100_000, 50_000, 90_000], [100_000] * 3)
    assert low == pytest.approx(0.5, abs=0.05) and high == pytest.approx(1.0, abs=0.05)
    assert seeds_interval([100, 200], [100, 200]) == (pytest.approx(1 / (1 + 1.96**2 / 300), abs=1e-5), 1.0)  # Wilson
    assert seeds_interval([0, 0], [5, 10]) == wilson_interval(0, 15)
