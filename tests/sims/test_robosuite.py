"""Settings that robosuite refuses are one line."""

from __future__ import annotations

from typing import Any

import pytest

from sims.adapters.robosuite import Robosuite, RobosuiteConfig
from sims.errors import UserError
from sims.examples import is_installed
from sims.subproc.vector_env import SubprocVectorEnv


@pytest.mark.skipif(not is_installed("robosuite"), reason="robosuite is not installed")
@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"robots": ("Pandaa",)}, "sim.robots ('Pandaa',), sim.controller 'BASIC': KeyError: 'Pandaa' ("),
        ({"controller": "BASICC"}, "sim.controller 'BASICC': AssertionError: Controller BASICC not found"),
        ({"task": "TwoArmLift"}, "sim.task 'TwoArmLift', sim.robots ('Panda',), sim.controller 'BASIC': ValueError: "),
    ],
)
def test_what_robosuite_refuses_is_one_line(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as caught:
        SubprocVectorEnv(RobosuiteConfig(num_envs=1, cameras=(), **settings), Robosuite)
    message = str(caught.value)
    assert message.startswith("robosuite does not accept sim.task")
    assert says in message
    assert "\n" not in message


@pytest.mark.skipif(not is_installed("robosuite"), reason="robosuite is not installed")
def test_a_control_step_is_a_whole_number_of_physics_steps() -> None:
    with pytest.raises(UserError, match=r"sim.control_hz 30 is no whole number .* of 0.002 s; take 31.25 or 29.4118"):
        SubprocVectorEnv(RobosuiteConfig(num_envs=1, cameras=(), control_hz=30), Robosuite)


def test_a_robot_is_needed() -> None:
    with pytest.raises(ValueError, match="robots must name one robot per arm, got none"):
        RobosuiteConfig(robots=())
