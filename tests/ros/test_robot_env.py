"""The robot as an environment, over real ROS topics: the rules of ``tests/sims/test_conformance.py``, in real time."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from episodes.recorder import RecordedEnv
from episodes.store import EpisodeStore
from real_robot.registry import ENVIRONMENTS
from real_robot.robot_env import RobotConfig, RobotEnv
from sims.chunk import step_chunk
from sims.errors import UserError
from sims.vector_env import MIN_INSTRUCTION_BYTES, CannotCapture, StartState, VectorEnv, decode_instructions
from tests.ros.cell import ROOT, Cell

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),  # of a parser that rclpy imports
]
MAX_STEPS = 12


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    cell = Cell(tmp_path_factory.mktemp("robot"), domain=20 + (os.getpid() + 40) % 80)
    try:
        cell.start_arm(camera_hz=20)
        yield cell
    finally:
        cell.close()


@pytest.fixture(scope="module")
def robot(cell: Cell) -> Iterator[VectorEnv]:
    with cell.environment():
        config = RobotConfig(
            file=ROOT / "configs/robots/fake_arm.yaml", tasks=("reach", "pick"), max_steps=MAX_STEPS,
            timeout_s=60.0,
        )  # fmt: skip
        env = ENVIRONMENTS[type(config)](config)
        yield env
        env.close()


def start(seed: int, task: int = 0) -> list[StartState]:
    return [StartState(task=task, seed=seed)]


def forward_chunk(steps: int, size: float = 0.5) -> torch.Tensor:
    """Motion forward and down, [1, steps, 7]."""
    action = torch.tensor([size, 0.0, -size, 0.0, 0.0, 0.0, -1.0])
    return action.expand(1, steps, -1).clone()


def test_an_image_that_cannot_be_read_is_waited_out(robot: VectorEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    truncated = io.BytesIO()
    Image.fromarray(np.zeros((48, 64, 3), dtype=np.uint8)).save(truncated, "jpeg")
    faults = [truncated.getvalue()[:-200]]

    def read(message: Any) -> np.ndarray:
        if faults:
            Image.open(io.BytesIO(faults.pop())).load()
        return image_array(message)

    from real_robot.ros.inputs import image_array

    monkeypatch.setattr("real_robot.ros.inputs.image_array", read)
    robot.reset(start=start(3))
    assert robot.observe().images.float().std() > 1.0
    assert faults == []


def test_shapes_types_and_instruction(robot: VectorEnv) -> None:
    spec = robot.spec
    assert not spec.can_capture
    assert (spec.num_envs, spec.action_dim, spec.state_dim, spec.cameras) == (1, 7, 8, ("agent", "wrist"))
    robot.reset(start=start(3, task=1))
    obs = robot.observe()
    assert (obs.images.shape, obs.images.dtype) == ((1, 2, 64, 64, 3), torch.uint8)
    assert (obs.state.shape, obs.state.dtype) == ((1, 8), torch.float32)
    assert obs.instruction.shape == (1, MIN_INSTRUCTION_BYTES)
    assert robot.spec.tasks[1] == "pick"
    assert {"block", "cube"} & set(decode_instructions(obs.instruction)[0].split())
    assert obs.images.float().std() > 1.0
    assert robot.observe([]).state.shape == (0, 8)
    step = robot.step(forward_chunk(1)[:, 0])
    for name, dtype in (("reward", torch.float32), ("terminated", torch.bool), ("valid", torch.bool)):
        assert (getattr(step, name).shape, getattr(step, name).dtype) == ((1,), dtype)
    assert step.valid.all()


def test_observing_changes_nothing_and_returns_copies(robot: VectorEnv) -> None:
    robot.reset(start=start(1))
    first = robot.observe()
    kept = first.map(torch.clone)
    again = robot.observe()
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.state, again.state)
    step_chunk(robot, forward_chunk(4), 1.0)
    assert not torch.equal(robot.observe().images, kept.images)
    assert torch.equal(first.images, kept.images)


def test_an_arm_that_has_come_to_rest_is_observed_anew(robot: VectorEnv) -> None:
    """As after an update of the policy: the next action begins where it came to rest."""
    robot.reset(start=start(1))
    step_chunk(robot, forward_chunk(4), 1.0)
    moving = robot.observe()
    time.sleep(2.0)
    resting = robot.observe()
    assert not torch.equal(moving.state, resting.state)
    again = robot.observe()
    assert torch.equal(resting.images, again.images)
    assert torch.equal(resting.state, again.state)


def test_the_end_effector_follows_the_actions(robot: VectorEnv) -> None:
    robot.reset(start=start(2))
    before = robot.observe().state[0, :3]
    chunk = step_chunk(robot, forward_chunk(8), 1.0)
    after = robot.observe().state[0, :3]
    assert chunk.num_executed.tolist() == [8]
    moved = after - before
    assert moved[0] > 0.02
    assert moved[2] < -0.02
    assert moved[1].abs() < 0.02


def test_a_truncated_episode_stays_finished(robot: VectorEnv) -> None:
    robot.reset(start=start(4))
    for i, action in enumerate(forward_chunk(MAX_STEPS, size=0.2).unbind(1)):
        step = robot.step(action)
        assert step.truncated.tolist() == [i == MAX_STEPS - 1]
        assert not step.terminated.any()
    before = robot.observe()
    again = robot.step(forward_chunk(1)[:, 0])
    assert again.truncated.all()
    assert (again.reward == 0).all()
    after = robot.observe()
    assert torch.equal(before.state, after.state)


def test_the_same_start_gives_the_same_observation(robot: VectorEnv) -> None:
    robot.reset(start=start(7))
    first = robot.observe()
    step_chunk(robot, forward_chunk(4), 1.0)
    robot.reset(start=start(8))
    other = robot.observe()
    robot.reset(start=start(7))
    again = robot.observe()
    torch.testing.assert_close(again.state, first.state, atol=5e-3, rtol=0)
    assert (again.images.float() - first.images.float()).abs().mean() < 1.0
    assert (other.images.float() - first.images.float()).abs().mean() > 1.0


def test_nothing_is_commanded_while_an_episode_is_set_up(robot: VectorEnv, monkeypatch: pytest.MonkeyPatch) -> None:
    """The setup moves the joints; the filter would take that for a collision."""
    assert isinstance(robot, RobotEnv)
    set_up, commanded = robot._episodes.reset, []

    def watched(task: str, seed: int, *, timeout_s: float) -> str:
        commanded.append(robot.control.loop.live)
        return set_up(task, seed, timeout_s=timeout_s)

    monkeypatch.setattr(robot._episodes, "reset", watched)
    for seed in range(20, 24):
        robot.reset(start=start(seed))
        assert robot.step(forward_chunk(1)[:, 0]).valid.all()
        robot.observe()  # at rest now, and still commanded
    assert commanded == 4 * [False]


def test_capture_and_unknown_tasks_are_refused(robot: VectorEnv) -> None:
    with pytest.raises(CannotCapture, match="start from a task and a seed only"):
        robot.capture()
    with pytest.raises(ValueError, match="task 5 is not in"):
        robot.reset(start=start(1, task=5))


def test_a_stop_makes_the_step_invalid_until_it_is_released(robot: VectorEnv) -> None:
    assert isinstance(robot, RobotEnv)
    robot.reset(start=start(5))
    robot.step(forward_chunk(1)[:, 0])
    with robot.control.lock:
        robot.control.loop.stop("test")
    robot._wait(lambda: not robot.control.loop.live, lambda: "not at rest")
    began_s = time.monotonic()
    step = robot.step(forward_chunk(1)[:, 0])
    assert time.monotonic() - began_s < 0.5 * robot.config.timeout_s  # nothing is waited for
    assert not step.valid.any()
    assert step.truncated.all()
    robot.control.loop.release()
    robot.reset(start=start(5))
    assert robot.step(forward_chunk(1)[:, 0]).valid.all()


def test_an_action_is_taken_after_a_pause_of_the_measurements(cell: Cell, robot: VectorEnv) -> None:
    robot.reset(start=start(6))
    arm = cell.processes["arm"]
    arm.send_signal(signal.SIGSTOP)
    threading.Timer(0.7, arm.send_signal, [signal.SIGCONT]).start()
    began_s = time.monotonic()
    chunk = step_chunk(robot, forward_chunk(4, size=0.1), 1.0)
    assert chunk.num_executed.tolist() == [4]
    assert time.monotonic() - began_s < 0.5 * robot.config.timeout_s


def test_episodes_are_recorded_as_in_simulation(robot: VectorEnv, tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    recorded = RecordedEnv(robot, store, source="policy", split="robot", policy_version="v")
    recorded.reset(start=start(9))
    for _ in range(3):
        recorded.observe()
        step_chunk(recorded, forward_chunk(4, size=0.1), 1.0)
    recorded.observe()
    (entry,) = store.select()
    episode = store.read(entry.id)
    assert episode.observation_steps.tolist() == [0, 4, 8, 12]
    assert episode.truncated[-1]
    assert episode.fingerprint["robot"] == "fake_arm"


def test_a_robot_file_without_an_episode_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"ros\.episode_node is missing"):
        RobotEnv(RobotConfig(file=ROOT / "configs/robots/generic.yaml", tasks=("reach",)))
