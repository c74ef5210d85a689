"""A person corrects a policy on an arm, over real ROS topics: who moves it, what stops it, what is recorded."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from episodes.schema import HOLD, HUMAN, POLICY
from episodes.store import EpisodeStore
from policies.bundle import save_bundle
from policies.policy import RobotSpec
from real_robot.arm_connection import connected
from real_robot.corrections.arm import ArmEnv
from real_robot.corrections.audit import AuditLog
from real_robot.corrections.frames import FrameThread, frames_of
from real_robot.corrections.human_input import RawInput
from real_robot.corrections.robot_thread import RobotThread
from real_robot.corrections.session import CorrectionSession, Refused
from real_robot.corrections.settings import ControlSettings
from real_robot.robot_file import Robot, RobotError, load_robot
from real_robot.serving.registry import load_backend
from real_robot.serving.versions import Versions
from sims.starts import StartSequence
from sims.tabletop.end_effector_control import POSITION_SCALE
from sims.tabletop.scene import FINGER_OPEN
from tests.real_robot.small_policies import small_policy
from tests.ros.cell import ROOT, Cell, started_arm

pytestmark = [
    pytest.mark.skipif(
        find_spec("rclpy") is None, reason="this Python has no rclpy; make test-ros runs these in one that has"
    ),
    pytest.mark.timeout(300),
    pytest.mark.filterwarnings("ignore:module 'sre_:DeprecationWarning"),  # of a parser that rclpy imports
]
POLICY_SPEC = RobotSpec(
    action_dim=7, state_dim=8, cameras=("agent", "wrist"), image_size=(32, 32), control_hz=20.0
)  # fmt: skip
# A loaded machine must not look like a person who is gone.
SETTINGS = ControlSettings(stale_input_s=1.0, lost_person_s=3.0, execute_steps=4)
UP, LET_GO = RawInput(deadman=True, keys=frozenset({"KeyR"})), RawInput()


def patient_robot() -> Robot:
    robot = load_robot(ROOT / "configs/robots/fake_arm.yaml")
    return dataclasses.replace(robot, control=dataclasses.replace(robot.control, max_image_age_s=1.0))


@pytest.fixture(scope="module")
def cell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cell]:
    domain = 20 + (os.getpid() + 60) % 80
    with started_arm(tmp_path_factory.mktemp("corrections"), domain, camera_hz=20) as cell:
        yield cell


@pytest.fixture
def robot(cell: Cell, tmp_path: Path) -> Iterator[RobotThread]:
    """Without the web server, as its connections use it; the arm at its start, nobody in control."""
    cell.ask("trigger", "/fake_arm/reset")
    policy = small_policy(robot=POLICY_SPEC)
    policy.fit_normalizer(*(0.1 * torch.randn(100, count, generator=torch.Generator()) for count in (8, 7)))
    save_bundle(policy, tmp_path / "bundle")
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(connected(patient_robot(), name="vla_rl_correct"))
        arm = ArmEnv(
            patient_robot(), connection, POLICY_SPEC, name="fake_arm", instruction="reach", max_steps=2000, held=(6,)
        )  # fmt: skip
        stack.callback(arm.close)
        store = stack.enter_context(EpisodeStore(tmp_path / "episodes", create=True))
        audit = stack.enter_context(contextlib.closing(AuditLog(tmp_path / "audit.jsonl")))
        session = CorrectionSession(
            arm, Versions(load_backend(tmp_path / "bundle")), store, SETTINGS,
            starts=StartSequence("train", seed=0, num_tasks=1), split="robot", audit=audit,
        )  # fmt: skip
        frames = stack.enter_context(contextlib.closing(FrameThread(frames_of(arm, None, 64), jpeg_quality=90)))
        thread = stack.enter_context(contextlib.closing(RobotThread(session, frames, audit)))
        thread.start()
        yield thread
        assert thread.failure is None


class Person:
    """Holds the lease and sends inputs as a browser does."""

    def __init__(self, robot: RobotThread, name: str = "Anna") -> None:
        holder = robot.lease.acquire(name, name)
        assert holder is not None
        self.robot, self.session, self.name, self.token = robot, robot.session, name, holder.token

    def does(self, what: str, *arguments: str) -> None:
        self.robot.command(lambda: getattr(self.session, what)(*arguments, person=self.name)).result(30)

    def sends(self, raw: RawInput, seconds: float) -> None:
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            assert self.robot.receive(self.name, self.token, raw)
            time.sleep(0.03)

    def sends_until(self, raw: RawInput, condition: object, what: str) -> None:
        deadline_s = time.monotonic() + 30
        while not condition():  # type: ignore[operator]
            assert time.monotonic() < deadline_s, (what, self.robot.states.newest)
            self.sends(raw, 0.05)


def steps_of(robot: RobotThread, actor: int) -> int:
    return sum(step.actor == actor for step in robot.session.attempt.steps)


def speed(cell: Cell) -> float:
    return max(float(cell.ask("speed")) for _ in range(10))


def test_nothing_moves_until_somebody_acts_and_a_corrected_episode_is_recorded(cell: Cell, robot: RobotThread) -> None:
    session = robot.session
    time.sleep(1.0)
    assert (session.mode, session.reason, session.attempt.length) == ("hold", "a new episode", 0)
    assert speed(cell) < 0.02
    finger = cell.ask("joints")[7]  # [m], whose action 1 is closed
    assert session.handover.last[6] == pytest.approx(1 - 2 * finger / FINGER_OPEN, abs=0.05)
    anna = Person(robot)
    anna.does("hand_back")
    anna.sends_until(LET_GO, lambda: steps_of(robot, POLICY) >= 8, "the policy")
    anna.does("take_over")
    anna.sends_until(UP, lambda: steps_of(robot, HUMAN) >= 12, "driving")
    anna.sends_until(UP, lambda: cell.ask("speed") > 0.02, "the arm's motion")
    anna.sends(LET_GO, 1.0)
    stopped_at = session.attempt.length
    assert session.attempt.steps[-1].actor == HOLD
    anna.sends(LET_GO, 0.5)
    assert session.attempt.length == stopped_at
    assert speed(cell) < 0.02
    anna.does("end", "success")
    assert session.last_episode is not None
    episode = session.store.read(session.last_episode)
    assert session.store.labels(episode.id) == {"outcome": "success", "success": True}
    assert (episode.operators, episode.split, episode.instruction) == (("Anna",), "robot", "reach")
    first = episode.actor.tolist().index(HUMAN)
    assert set(episode.actor[:8]) == {POLICY}
    assert set(episode.actor[8:first]) <= {POLICY, HOLD}  # until the deadman is held
    assert episode.observation_steps[0] == 0
    assert episode.observation_steps[-1] == episode.num_steps
    # where the person drove up, the arm rose [m], about as far as the recorded actions say
    human = np.flatnonzero(episode.actor == HUMAN)
    at = dict(zip(episode.observation_steps.tolist(), episode.state[:, 2].tolist(), strict=True))
    rise = at[episode.num_steps] - at[max(step for step in at if step <= human[0])]
    assert rise > 0.05
    assert abs(episode.action[human[0] :, 2].sum() * POSITION_SCALE - rise) < 0.5 * rise
    assert (np.diff(episode.applied_time_s) > 0).all()


def test_a_person_who_is_lost_leaves_the_arm_holding_whoever_drove(cell: Cell, robot: RobotThread) -> None:
    session, anna = robot.session, Person(robot)
    anna.does("take_over")
    anna.sends_until(UP, lambda: steps_of(robot, HUMAN) >= 5, "driving")
    cell.wait(lambda: session.mode == "hold", 20, "the end of the lease")
    assert session.reason == "lost contact with the person who drove"
    assert not robot.receive("Anna", anna.token, UP)
    ben = Person(robot, "Ben")
    ben.does("hand_back")
    ben.sends_until(LET_GO, lambda: steps_of(robot, POLICY) >= 5, "the policy")
    robot.release("Ben", "the connection ended")  # nobody could stop it
    cell.wait(lambda: session.mode == "hold", 10, "the hold")
    time.sleep(0.5)
    length = session.attempt.length
    time.sleep(1.0)
    assert (session.mode, session.attempt.length) == ("hold", length)
    assert speed(cell) < 0.02


def test_a_latched_stop_is_shown_and_nobody_moves_the_arm_before_it_is_released(cell: Cell, robot: RobotThread) -> None:
    anna = Person(robot)
    anna.does("take_over")
    anna.sends_until(UP, lambda: steps_of(robot, HUMAN) >= 5, "driving")
    assert robot.states.newest["stopped"] == ""
    cell.ask("trigger", "/vla_rl_correct/stop")
    anna.sends_until(UP, lambda: robot.states.newest["mode"] == "hold", "the stop")
    assert robot.states.newest["stopped"] == "the stop service was called"
    assert robot.states.newest["reason"] == "stopped: the stop service was called"
    for what in ("take_over", "hand_back"):
        with pytest.raises(Refused, match="stopped: the stop service was called"):
            anna.does(what)
    anna.sends(UP, 1.0)
    length = robot.session.attempt.length
    anna.does("release_stop")
    anna.sends(UP, 1.0)
    assert (robot.session.mode, robot.session.attempt.length) == ("hold", length)
    assert robot.states.newest["stopped"] == ""
    anna.does("take_over")
    anna.sends_until(UP, lambda: robot.session.attempt.length > length + 5, "driving again")
    anna.does("end", "failure")
    with pytest.raises(Refused, match="cannot go back"):
        robot.command(lambda: robot.session.rewind(0, person="Anna")).result(30)


def test_actions_that_are_positions_are_refused(cell: Cell) -> None:
    robot = patient_robot()
    scales = dataclasses.replace(robot.control.scales, ranges=tuple(axis.position for axis in robot.limits.axes))
    control = dataclasses.replace(robot.control, embodiment="joint_positions", scales=scales)
    robot, spec = dataclasses.replace(robot, control=control), dataclasses.replace(POLICY_SPEC, action_dim=8)
    with connected(robot, name="vla_rl_refused") as connection, pytest.raises(RobotError, match="are positions"):
        ArmEnv(robot, connection, spec, name="fake_arm", instruction="reach", max_steps=10, held=(6,))
