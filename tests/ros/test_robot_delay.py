"""The arm as an environment for a policy that was trained with a delay, over real ROS topics."""

from __future__ import annotations

import contextlib
import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import yaml

from policies.policy import RobotSpec
from real_robot.robot_env import RobotConfig, RobotEnv
from sims.chunk import step_chunk
from sims.vector_env import StartState
from tests.ros.cell import ROOT, Cell

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),  # of a parser that rclpy imports
]
CHUNKS, SIZE = 8, 4
FORWARD = torch.tensor([0.2, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0]).expand(1, SIZE, -1)


def patient_file(folder: Path) -> Path:
    """The fake arm's, with the lead of other arms: two control steps, in which a busy machine may miss more ticks."""
    document = yaml.safe_load((ROOT / "configs/robots/fake_arm.yaml").read_text())
    document["limits"]["command_lead"] = "100 ms"
    document["control"]["max_image_age_s"] = 1.0
    path = folder / "fake_arm.yaml"
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def test_chunks_of_a_policy_with_a_delay_follow_each_other_without_a_rest(tmp_path: Path) -> None:
    config = RobotConfig(file=patient_file(tmp_path), tasks=("reach",), max_steps=100, timeout_s=60.0, action_delay=3)
    with contextlib.closing(Cell(tmp_path, domain=20 + (os.getpid() + 70) % 80)) as cell:
        cell.start_arm(camera_hz=20)
        with cell.environment(), contextlib.closing(RobotEnv(config)) as env:
            assert RobotSpec.of(env.spec).action_delay == 3
            start = [StartState(task=0, seed=11)]
            env.reset(start=start)
            env.observe()
            env.step(FORWARD[:, 0])
            began, reached = vars(env.control.loop.counters).copy(), []
            for _ in range(CHUNKS):
                step_chunk(env, FORWARD, 1.0)
                reached.append(float(env.observe().state[0, 0]))  # while the arm moves
            counters = vars(env.control.loop.counters)
            rests = counters["holds"] - began["holds"]
            env.reset(start=start)
            assert vars(env.control.loop.counters)["actions"] - began["actions"] >= CHUNKS * SIZE
    # without the delay the arm rests at every observation; a machine with other work is late for some
    assert rests < CHUNKS / 2
    assert reached == sorted(reached)
