"""What the controls of an evaluation change, and intervals over seeds."""

import pytest
import torch

from sims.numbers.statistics import seeds_interval, wilson_interval
from sims.vector_env import Observation, StartState, encode_instructions
from tests.worlds import PointEnv
from vla_rl.config.controls import CONTROLS
from vla_rl.runners.controls import changed, why_not

OBS = Observation(
    images=torch.arange(4 * 2 * 3, dtype=torch.uint8).reshape(4, 2, 1, 1, 3),
    state=torch.ones(4, 5),
    instruction=encode_instructions(["push the red block", "pick up the blue block", "reach", "open the drawer"]),
)
PARTS = ("images", "state", "instruction")


@pytest.mark.parametrize("control", CONTROLS)
def test_a_control_changes_one_part(control: str) -> None:
    obs = changed(OBS, control, torch.Generator().manual_seed(0))
    different = {part for part in PARTS if not torch.equal(getattr(obs, part), getattr(OBS, part))}
    kind, part = control.split("_")
    assert different == {{"cameras": "images"}.get(part, part)}
    if kind == "blank":
        assert not getattr(obs, part).any()


def test_none_changes_nothing() -> None:
    assert changed(OBS, "none", torch.Generator()) is OBS


def test_shuffled_instructions_are_those_of_other_environments() -> None:
    obs = changed(OBS, "shuffled_instruction", torch.Generator().manual_seed(0))
    assert sorted(obs.instruction.tolist()) == sorted(OBS.instruction.tolist())


def test_swapped_cameras_are_in_reverse_order() -> None:
    assert torch.equal(changed(OBS, "swapped_cameras", torch.Generator()).images[:, 0], OBS.images[:, 1])


def test_a_control_that_would_change_nothing_says_why() -> None:
    env = PointEnv(num_envs=2)
    one, two = ([StartState(task=task, seed=i) for i, task in enumerate(tasks)] for tasks in ((1, 1, 1), (1, 1, 0)))
    assert why_not("swapped_cameras", env, two) == "one camera"
    assert why_not("shuffled_instruction", env, one) == "one instruction"
    assert why_not("shuffled_instruction", env, two) == ""  # not in the same batch of environments, at first
    assert why_not("shuffled_instruction", PointEnv(num_envs=1), two).startswith("one environment")
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
