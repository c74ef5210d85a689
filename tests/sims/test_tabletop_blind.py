"""Nobody succeeds in the tabletop tasks blindly; the whole table is benchmarks/results/blind_controls.json.

With few episodes: fails where the success rate is above the limit beyond chance (95 % interval).
"""

import pytest
import torch

from benchmarks.blind_controls import constant, demonstrate, instruction_blind, limits, replayed, starts, state_only
from sims.numbers.statistics import wilson_interval
from sims.tabletop.tasks.registry import TASKS

EPISODES = 20
# Down, down and forward, down and sideways: with the gripper closed and open.
ACTIONS = [(x, y, -1.0, 0, 0, 0, grip) for x, y in ((0, 0), (1, 0), (0, 1), (1, -1)) for grip in (-1.0, 1.0)]


@pytest.mark.parametrize("name", TASKS)
def test_blind_controllers_fail(name: str) -> None:
    fresh = starts(EPISODES, seed=0)
    demonstrations, expert = demonstrate(name, starts(EPISODES, seed=1))
    assert expert.all()
    found = {
        "constant": constant(name, torch.tensor(ACTIONS).repeat_interleave(8, dim=0), fresh[:8] * len(ACTIONS)),
        "replayed": replayed(name, demonstrations, fresh),
        "instruction-blind": instruction_blind(name, fresh),
        "state-only": state_only(name, demonstrations, fresh),
    }
    for control, success in found.items():
        assert wilson_interval(int(success.sum()), len(success))[0] <= limits(name)[control], control
    told_the_named = torch.arange(EPISODES) % len(TASKS[name].candidates) == 0
    assert torch.equal(found["instruction-blind"], told_the_named)  # any other candidate never succeeds
