"""A simulator, a policy and an algorithm of another distribution, in a run that is killed and resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.vla_rl.test_train import kill_when
from vla_rl.runs.metrics import read_metrics

MODULE = """
from dataclasses import dataclass, replace
from typing import Literal

from policies.gaussian import GaussianPolicy, GaussianPolicyConfig
from tests.reach_env import ReachEnv
from vla_rl.algorithms.ppo import PPO, PPOConfig


@dataclass(frozen=True, kw_only=True)
class RobotCellConfig:
    name: Literal["robot_cell"] = "robot_cell"
    num_envs: int = 4


class RobotCell(ReachEnv):
    '''Cannot save its state, like hardware.'''

    def __init__(self, config):
        super().__init__(num_envs=config.num_envs, max_steps=20)
        self.spec = replace(self.spec, can_capture=False)

    def capture(self, env_ids=None):
        raise AssertionError("capture was called")


@dataclass(frozen=True, kw_only=True)
class TinyConfig(GaussianPolicyConfig):
    name: Literal["tiny"] = "tiny"


@dataclass(frozen=True, kw_only=True)
class MyPPOConfig(PPOConfig):
    name: Literal["my_ppo"] = "my_ppo"


SIMULATOR = (RobotCellConfig, RobotCell)
POLICY = (TinyConfig, GaussianPolicy)
ALGORITHM = (MyPPOConfig, PPO)
"""
ENTRY_POINTS = """
[vla_rl.simulators]
robot_cell = third_party:SIMULATOR
[vla_rl.policies]
tiny = third_party:POLICY
[vla_rl.algorithms]
my_ppo = third_party:ALGORITHM
"""
CONFIG = """
sim: {name: robot_cell}
start:
  name: imitation
  episodes: 4
  policy: {name: tiny, action_horizon: 4}
  bc: {steps: 5, batch_size: 8}
algorithm:
  name: my_ppo
  iterations: 6
  chunks: 2
  critic_warmup: 1
  update: {minibatch: 8, micro_batch: 8, epochs: 1}
evaluation: {episodes: 4, validation_episodes: 4, validate_every: 2, videos_per_task: 0}
checkpoint_every: 1
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a process in which the distribution is installed."""
    site = tmp_path / "site"
    (site / "third_party-1.0.dist-info").mkdir(parents=True)
    (site / "third_party.py").write_text(MODULE)
    (site / "third_party-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n"
    )
    (site / "third_party-1.0.dist-info" / "entry_points.txt").write_text(ENTRY_POINTS)
    (tmp_path / "config.yaml").write_text(CONFIG)
    return os.environ | {"PYTHONPATH": f"{site}{os.pathsep}{Path.cwd()}"}


def test_a_run_without_capture_is_checkpointed_killed_and_resumed(tmp_path: Path, environment: dict[str, str]) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "vla_rl.cli", "train", str(tmp_path / "config.yaml"), "--run-dir", str(run_dir)]
    with subprocess.Popen(command, env=environment) as process:
        kill_when(process, run_dir, lines=3)
    resumed = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, check=True)
    assert "reach cannot save its state: its episodes restart" in resumed.stderr
    records = read_metrics(run_dir)
    assert [record["iteration"] for record in records] == list(range(6))
    assert sum("validation" in record for record in records) == 3
    assert json.loads((run_dir / "result.json").read_text())["rl"]["episodes"] == 4
    checked = [sys.executable, "-m", "vla_rl.cli", "eval", str(run_dir), "--episodes", "4", "--json"]
    evaluated = subprocess.run(checked, env=environment, capture_output=True, text=True, check=True)
    assert json.loads(evaluated.stdout)["episodes"] == 4


def test_what_is_not_installed_is_named_with_what_is(tmp_path: Path, environment: dict[str, str]) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(CONFIG.replace("robot_cell", "robot_sell"))
    command = [sys.executable, "-m", "vla_rl.cli", "train", str(wrong), "--run-dir", str(tmp_path / "run")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "did you mean 'robot_cell'" in done.stderr
