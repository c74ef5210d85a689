"""The Isaac Lab adapter with a substitute that resets inside ``step`` as Isaac Lab does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sims.adapters.isaaclab import IsaacLabConfig, IsaacLabEnv, instruction_of, registered_name
from sims.errors import UserError
from sims.vector_env import CannotCapture, StartState
from tests.sims import isaaclab_double

CONFIG = IsaacLabConfig(
    task=isaaclab_double.TASK, cameras=("table_cam",), state=("policy.eef_pos", "policy.elapsed"), device="cpu",
    num_envs=3,
)  # fmt: skip
RIGHT, DOWN, STAY = [1.0, 0.0, 0.0], [0.0, -1.0, 0.0], [0.0, 0.0, 0.0]


@pytest.fixture(autouse=True)
def double() -> None:
    isaaclab_double.install()


@pytest.fixture
def env() -> Iterator[IsaacLabEnv]:
    opened = IsaacLabEnv(CONFIG)
    opened.reset(start=[StartState(task=0, seed=i) for i in range(3)])
    yield opened
    opened.close()


def test_spec(env: IsaacLabEnv) -> None:
    spec = env.spec
    assert (spec.action_dim, spec.state_dim, spec.image_size, spec.max_steps) == (3, 4, (4, 6), 12)
    assert spec.control_hz == 20.0
    assert spec.tasks == ("lift cube franka ik rel",)
    assert isaaclab_double.AppLauncher.launched[0] == {"headless": True, "enable_cameras": True, "device": "cpu"}


def test_observation_at_the_end_is_the_true_successor(env: IsaacLabEnv) -> None:
    """Environment 0 succeeds, 1 drops the cube, 2 reaches the time limit; Isaac Lab has reset all of them already."""
    action = torch.tensor([RIGHT, DOWN, STAY])
    ended_at = {}
    for i in range(1, 13):
        step = env.step(action)
        for row in step.terminated.logical_or(step.truncated).nonzero().flatten().tolist():
            ended_at.setdefault(row, i)
    assert step.terminated.tolist() == [True, True, False]
    assert step.success.tolist() == [True, False, False]
    assert step.truncated.tolist() == [False, False, True]
    assert ended_at[2] == 12
    obs = env.observe()
    assert obs.state[0, 0] > 1.0
    assert obs.state[1, 1] < -1.0
    assert obs.state[:, 3].tolist() == [ended_at[0], ended_at[1], 12]
    assert obs.images[:, 0, 0, 0, 0].tolist() == [ended_at[0], ended_at[1], 12]
    for _ in range(3):
        again = env.step(action)
    assert (again.reward == 0).all()
    assert again.success.tolist() == [True, False, False]
    assert torch.equal(env.observe().state, obs.state)


def test_partial_reset_and_seeds(env: IsaacLabEnv) -> None:
    first = env.observe()
    env.step(torch.tensor([RIGHT, RIGHT, RIGHT]))
    moved = env.observe()
    env.reset([1], start=[StartState(task=0, seed=0)])
    now = env.observe()
    assert torch.equal(now.state[1], first.state[0])  # the same seed in another row
    assert torch.equal(now.state[[0, 2]], moved.state[[0, 2]])


def test_ids_with_and_without_version(env: IsaacLabEnv) -> None:
    IsaacLabEnv(replace(CONFIG, task=isaaclab_double.TASK.removesuffix("-v0"))).close()
    with pytest.raises(UserError, match=r"Isaac Lab has no 'Isaac-Fly-v0'; it has .*Isaac-Lift-Cube"):
        IsaacLabEnv(replace(CONFIG, task="Isaac-Fly-v0"))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"state": ("policy.mass",)}, r"no 'policy.mass'; at 'mass' there are \['eef_pos', 'elapsed'\]"),
        ({"state": ("critic.x",)}, "the group is concatenated"),
        ({"cameras": ("roof",)}, r"no 'roof'; it has \['table_cam'\]"),
    ],
)
def test_errors_of_wrong_settings_list_the_allowed_values(changes: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        IsaacLabEnv(replace(CONFIG, **changes))


def test_unknown_success_term(env: IsaacLabEnv) -> None:
    other = IsaacLabEnv(replace(CONFIG, success="won"))
    with pytest.raises(UserError, match=r"no termination term 'won', but \['time_out', 'success', 'dropped'\]"):
        other.step(torch.zeros(3, 3))


def test_states_are_not_captured(env: IsaacLabEnv) -> None:
    assert not env.spec.can_capture
    with pytest.raises(CannotCapture, match="start from a task and a seed only"):
        env.capture()


REAL = Path(__file__).parents[2] / ".venv-isaaclab"


@pytest.mark.skipif(not (REAL / ".installed").exists(), reason="make isaaclab")
def test_with_isaac_labs_own_step_managers_registry_and_launcher() -> None:
    """Version 3.0 without Isaac Sim (tests/sims/isaaclab_real.py); ends as in the test with the substitute."""
    variables = os.environ | {"PYTHONPATH": os.pathsep.join([str(REAL.parent), str(REAL)])}
    command = [sys.executable, "-m", "tests.sims.isaaclab_real"]
    done = subprocess.run(command, capture_output=True, text=True, env=variables, cwd=REAL.parent, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["fingerprint"]["quaternions"] == "xyzw"
    assert found["max_steps"] == 12
    assert found["start_spread"] == 0.0
    assert (found["terminated"], found["truncated"]) == ([True, True, False], [False, False, True])
    assert found["success"] == [True, False, False]
    assert found["paid"] == [1.0, 0.0, 0.0]
    assert found["position_x_of_0"] > 1.0
    assert found["position_y_of_1"] < -1.0
    assert found["elapsed"] == [10.0, 11.0, 12.0]
    assert found["brightness"] == [10, 11, 12]
    assert found["default_task"] == "IsaacContrib-Stack-Cube-Franka-IK-Rel-Visuomotor"
    assert found["default_settings"] == {"cameras": True, "state": True, "success": True}


def test_names_of_both_versions() -> None:
    known = ["Isaac-Reach-Franka", "IsaacContrib-Lift-Cube-Franka-IK-Rel", "IsaacContrib-Stack-Cube-SO101-v0"]
    assert registered_name("Isaac-Reach-Franka-v0", known) == known[0]
    assert registered_name("Isaac-Lift-Cube-Franka-IK-Rel-v0", known) == known[1]
    assert registered_name("IsaacContrib-Stack-Cube-SO101", known) == known[2]


def test_command_that_starts_isaac_sim_first_imports_no_torch_before() -> None:
    code = "import sys, vla_rl.cli.isaaclab; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_instruction_is_without_isaac_labs_prefix() -> None:
    for task in ("Isaac-Stack-Cube-Franka-v0", "IsaacContrib-Stack-Cube-Franka"):
        assert instruction_of(task) == "stack cube franka"
