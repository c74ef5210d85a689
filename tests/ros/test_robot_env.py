"""The robot as a world, over a real wire: what ``tests/sims/test_conformance.py`` asks of simulators, in real time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from episodes.recorder import RecordedEnv
from episodes.store import EpisodeStore
from sims.chunk import step_chunk
from sims.errors import UserError
from sims.vector_env import MIN_INSTRUCTION_BYTES, StartState, VectorEnv, decode_instructions
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
    cell = Cell(tmp_path_factory.mktemp("world"), domain=20 + (os.getpid() + 40) % 80)
    try:
        cell.start_arm(camera_hz=20)
        yield cell
    finally:
        cell.close()


@pytest.fixture(scope="module")
def world(cell: Cell) -> Iterator[VectorEnv]:
    with cell.environment():
        from real_robot.robot_env import RobotEnv, RobotEnvConfig

        config = RobotEnvConfig(
            robot_file=ROOT / "configs/robots/fake_arm.yaml", tasks=("reach", "pick"), max_steps=MAX_STEPS,
            patience_s=60.0,
        )  # fmt: skip
        env = RobotEnv(config)
        yield env
        env.close()


def start(seed: int, task: int = 0) -> list[StartState]:
    return [StartState(task=task, seed=seed)]


def forward(steps: int, size: float = 0.5) -> torch.Tensor:
    """Down and ahead, [1, steps, 7]."""
    action = torch.tensor([size, 0.0, -size, 0.0, 0.0, 0.0, -1.0])
    return action.expand(1, steps, -1).clone()


def test_shapes_types_and_words(world: VectorEnv) -> None:
    spec = world.spec
    assert (spec.num_envs, spec.action_dim, spec.state_dim, spec.cameras) == (1, 7, 8, ("agent", "wrist"))
    world.reset(start=start(3, task=1))
    obs = world.observe()
    assert (obs.images.shape, obs.images.dtype) == ((1, 2, 64, 64, 3), torch.uint8)
    assert (obs.state.shape, obs.state.dtype) == ((1, 8), torch.float32)
    assert obs.instruction.shape == (1, MIN_INSTRUCTION_BYTES)
    assert "block" in decode_instructions(obs.instruction)[0]
    assert obs.images.float().std() > 1.0
    assert world.observe([]).state.shape == (0, 8)
    step = world.step(forward(1)[:, 0])
    for name, dtype in (("reward", torch.float32), ("terminated", torch.bool), ("valid", torch.bool)):
        assert (getattr(step, name).shape, getattr(step, name).dtype) == ((1,), dtype)
    assert step.valid.all()


def test_looking_changes_nothing_and_gives_copies(world: VectorEnv) -> None:
    world.reset(start=start(1))
    first = world.observe()
    kept = first.map(torch.clone)
    again = world.observe()
    assert torch.equal(first.images, again.images)
    assert torch.equal(first.state, again.state)
    step_chunk(world, forward(4), 1.0)
    assert not torch.equal(world.observe().images, kept.images)
    assert torch.equal(first.images, kept.images)


def test_the_tool_goes_where_the_actions_say(world: VectorEnv) -> None:
    world.reset(start=start(2))
    before = world.observe().state[0, :3]
    chunk = step_chunk(world, forward(8), 1.0)
    after = world.observe().state[0, :3]
    assert chunk.num_executed.tolist() == [8]
    moved = after - before
    assert moved[0] > 0.02
    assert moved[2] < -0.02
    assert moved[1].abs() < 0.02


def test_time_runs_out_and_the_row_stands_still(world: VectorEnv) -> None:
    world.reset(start=start(4))
    for i, action in enumerate(forward(MAX_STEPS, size=0.2).unbind(1)):
        step = world.step(action)
        assert step.truncated.tolist() == [i == MAX_STEPS - 1]
        assert not step.terminated.any()
    before = world.observe()
    again = world.step(forward(1)[:, 0])
    assert again.truncated.all()
    assert (again.reward == 0).all()
    after = world.observe()
    assert torch.equal(before.state, after.state)


def test_the_same_start_is_the_same_scene(world: VectorEnv) -> None:
    world.reset(start=start(7))
    first = world.observe()
    step_chunk(world, forward(4), 1.0)
    world.reset(start=start(8))
    other = world.observe()
    world.reset(start=start(7))
    again = world.observe()
    torch.testing.assert_close(again.state, first.state, atol=5e-3, rtol=0)
    assert (again.images.float() - first.images.float()).abs().mean() < 1.0
    assert (other.images.float() - first.images.float()).abs().mean() > 1.0


def test_what_only_a_simulator_can_do_is_refused(world: VectorEnv) -> None:
    with pytest.raises(UserError, match="start from a task and a seed only"):
        world.capture()
    with pytest.raises(ValueError, match="task 5 is not in"):
        world.reset(start=start(1, task=5))


def test_a_stop_makes_the_step_invalid_until_it_is_released(world: VectorEnv) -> None:
    from real_robot.robot_env import RobotEnv

    assert isinstance(world, RobotEnv)
    world.reset(start=start(5))
    world.step(forward(1)[:, 0])
    with world._control.lock:
        world._control.loop.stop("test")
    world._wait(lambda: world._control.loop.filter.at_rest, lambda: "no rest")
    patient, world.config = world.config, type(world.config)(**{**vars(world.config), "patience_s": 0.5})
    step = world.step(forward(1)[:, 0])
    world.config = patient
    assert not step.valid.any()
    assert step.truncated.all()
    world._control.loop.filter.release()
    world.reset(start=start(5))
    assert world.step(forward(1)[:, 0]).valid.all()


def test_episodes_on_the_robot_are_recorded_as_in_simulation(world: VectorEnv, tmp_path: Path) -> None:
    store = EpisodeStore(tmp_path / "store", create=True)
    recorded = RecordedEnv(world, store, source="policy", split="robot", policy_version="v")
    recorded.reset(start=start(9))
    for _ in range(3):
        recorded.observe()
        step_chunk(recorded, forward(4, size=0.1), 1.0)
    recorded.observe()
    (entry,) = store.select()
    episode = store.read(entry.id)
    assert episode.observation_steps.tolist() == [0, 4, 8, 12]
    assert episode.truncated[-1]
    assert episode.fingerprint["robot"] == "fake_arm"


def test_a_robot_without_a_scene_is_no_world(tmp_path: Path) -> None:
    from real_robot.robot_env import RobotEnv, RobotEnvConfig

    with pytest.raises(UserError, match=r"ros\.scene is missing"):
        RobotEnv(RobotEnvConfig(robot_file=ROOT / "configs/robots/generic.yaml", tasks=("reach",)))
