"""An arm driven by keys: simulated servos behind LeRobot's interface, the keys through a pipe as from a terminal."""

from __future__ import annotations

import os
import signal
import string
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pytest
import yaml

from episodes.store import EpisodeStore
from real_robot import teleop
from real_robot.control.embodiment import JointPositions
from real_robot.control.human_source import HumanSource, position_dimensions
from real_robot.control.panda_end_effector import PandaEndEffector
from real_robot.lerobot.arm import LeRobotArm, LeRobotConnection
from real_robot.operation import teleop_session
from real_robot.robot_file import load_robot
from real_robot.safety.commands import Measurement
from sims.tabletop.layout import START_JOINTS
from tests.real_robot.lerobot_plugins.simulated_device import SimulatedServos
from tests.real_robot.test_control_loop import FakeCamera
from tests.real_robot.test_control_thread import wait
from tests.real_robot.test_lerobot import so101
from tests.real_robot.test_safety_streams import ROBOTS

POSE = np.array([20.0, -30.0, 40.0, 10.0, -50.0, 60.0])  # degrees; the gripper in percent
OPTIONS: dict[str, Any] = {"control_hz": 25.0, "image_size": (24, 32), "name": "so101"}
LARGEST = len(teleop.KEYS)


@pytest.fixture
def servos(monkeypatch: pytest.MonkeyPatch) -> SimulatedServos:
    """In place of LeRobot's driver, which needs LeRobot."""
    made = SimulatedServos()
    made.at = made.goal = POSE
    monkeypatch.setattr("real_robot.arm_connection.make_driver", lambda section: made)
    return made


@contextmanager
def by_keys(path: Path, *, store: Path | None = None) -> Iterator[tuple[teleop.TeleopSession, TextIO]]:
    """The session, and where a person types."""
    read, write = os.pipe()
    robot = load_robot(path)
    with (
        os.fdopen(read) as keys,
        os.fdopen(write, "w") as person,
        teleop_session(robot, leader="", stream=keys, store=store, **OPTIONS) as session,
    ):
        wait(lambda: session._connection.joints.fresh(0.1))
        yield session, person
        person.close()  # ends the thread that reads


def without_leader(folder: Path, **control: Any) -> Path:
    """The SO-101, whose actions are positions; ``control``: changes of that section."""
    path = so101(folder)
    document = yaml.safe_load(path.read_text())
    del document["leader"]
    document["control"] |= control
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


@contextmanager
def typed(keys: str) -> Iterator[TextIO]:
    """A terminal on which these were pressed."""
    with tempfile.TemporaryFile("w+") as file:
        file.write(keys)
        file.seek(0)
        yield file


def hold(key: str, person: TextIO, seconds: float, *, until: Callable[[], object] = lambda: True) -> None:
    """As a terminal repeats a key that is held, so long at least, and ``until`` this has happened."""
    began_s = time.monotonic()
    while (held_s := time.monotonic() - began_s) < seconds or not until():
        assert held_s < 60, f"{key} was held for a minute"
        print(key, end="", file=person, flush=True)
        time.sleep(0.03)
    time.sleep(0.5)


@pytest.mark.real_time
def test_a_key_moves_its_joint_alone_where_actions_are_positions(servos: SimulatedServos, tmp_path: Path) -> None:
    with by_keys(without_leader(tmp_path)) as (session, person):
        session.begin("by hand", task="by hand")
        hold("q", person, 1.0, until=lambda: servos.goal[0] > POSE[0] + 5.0)
        first = servos.goal.copy()
        assert 5.0 < first[0] - POSE[0] < 60.0  # degrees; 44 per second
        np.testing.assert_allclose(first[1:], POSE[1:], atol=1e-3)
        hold("s", person, 1.0, until=lambda: servos.goal[1] < POSE[1] - 5.0)  # the next joint, the other way
        assert -60.0 < servos.goal[1] - POSE[1] < -5.0
        np.testing.assert_allclose(np.delete(servos.goal, 1), np.delete(first, 1), atol=1e-3)
        session.end(success=False)
        second = servos.goal.copy()
        session.begin("by hand", task="by hand")
        hold("h", person, 1.0, until=lambda: servos.goal[5] > second[5] + 1.0)
        assert servos.goal[5] > second[5] + 1.0
        np.testing.assert_allclose(servos.goal[:5], second[:5], atol=1e-3)


@pytest.mark.real_time
def test_an_arm_that_was_moved_by_hand_between_episodes_starts_where_it_is(
    servos: SimulatedServos, tmp_path: Path
) -> None:
    with by_keys(without_leader(tmp_path)) as (session, person):
        session.begin("by hand", task="by hand")
        hold("q", person, 0.5)
        session.end(success=False)
        time.sleep(0.5)
        servos.at = servos.goal = moved = POSE + 15.0  # without torque
        time.sleep(0.2)
        before = len(servos.sent)
        session.begin("by hand", task="by hand")
        time.sleep(0.5)
        goals = [goal[:5] for _, goal in servos.sent[before:]]  # the gripper goes on pressing as before
        assert goals
        np.testing.assert_allclose(goals, [moved[:5]] * len(goals), atol=0.5)


@pytest.mark.real_time
def test_keys_do_not_begin_where_an_action_cannot_express_the_pose(servos: SimulatedServos, tmp_path: Path) -> None:
    ranges = yaml.safe_load((ROBOTS / "so101.yaml").read_text())["control"]["joint_range"]
    path = without_leader(tmp_path, joint_range=ranges | {"elbow_flex": ["-0.1 rad", "0.1 rad"]})
    with by_keys(path) as (session, _), pytest.raises(ValueError, match=r"beyond what the actions \[2\] reach"):
        session.begin("by hand", task="by hand")


@pytest.mark.real_time
def test_y_ends_an_episode_of_six_joints_as_a_success(
    servos: SimulatedServos, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "store"
    with by_keys(without_leader(tmp_path), store=store) as (session, person):
        monkeypatch.setattr(sys, "stdin", session.keyboard._stream)

        def types() -> None:
            print("n", end="", file=person, flush=True)
            time.sleep(0.5)
            hold("q", person, 0.5)
            print("y0", end="", file=person, flush=True)

        typing = threading.Thread(target=types)
        typing.start()
        teleop.run_teleop(session, "by hand", "by hand")
        typing.join()
        wait(lambda: session._recorder is not None and session._recorder.recorded == 1)
    (entry,) = EpisodeStore(store).select()
    assert EpisodeStore(store).read(entry.id).succeeded


@pytest.mark.real_time
def test_every_episode_is_a_start_of_its_own(servos: SimulatedServos, tmp_path: Path) -> None:
    """Recordings are divided by task and seed into those that are fitted to and those that are held out."""
    store = tmp_path / "store"
    with by_keys(without_leader(tmp_path), store=store) as (session, person):
        for recorded in (1, 2):
            session.begin("by hand", task="by hand")
            hold("q", person, 1.5)
            session.end(success=True)
            wait(lambda recorded=recorded: session._recorder is not None and session._recorder.recorded == recorded)
    first, second = EpisodeStore(store).select()
    assert first.seed != second.seed


@pytest.mark.parametrize("action_dim", range(LARGEST + 1))
def test_no_key_that_is_a_command_moves_an_arm(action_dim: int) -> None:
    commands, motions = "nyx c0", "".join(teleop.KEYS[:action_dim])
    assert len(set(commands + motions)) == len(commands + motions)
    with typed(commands + motions) as stream:
        keyboard = teleop.KeyboardInput(stream, action_dim)
        keyboard._thread.join()
    assert "".join(keyboard.commands) == commands == "".join(teleop.COMMANDS)
    assert keyboard.motions.count("action") == action_dim


@pytest.mark.parametrize(("more", "said"), [(0, "action 8"), (5, "no keys for the actions 9 to 13: use a leader")])
def test_actions_without_a_key_are_said(more: int, said: str) -> None:
    """As of two arms."""
    with typed("") as stream:
        keyboard = teleop.KeyboardInput(stream, LARGEST + more)
        keyboard._thread.join()
    assert keyboard.motions.endswith(said)


def test_a_byte_that_is_no_text_does_not_end_the_keyboard() -> None:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stream:
        stream.buffer.write(b"n\xe9 ")  # as of a Latin-1 terminal
        stream.seek(0)
        keyboard = teleop.KeyboardInput(stream, 0)
        keyboard._thread.join()
    assert keyboard.commands[0] == "n"
    assert keyboard.commands[-1] == " "


@pytest.mark.real_time
def test_a_keyboard_that_is_gone_ends_the_program(servos: SimulatedServos, tmp_path: Path) -> None:
    with by_keys(without_leader(tmp_path)) as (session, person):
        session.begin("by hand", task="by hand")
        person.close()
        running = threading.Thread(target=teleop.run_teleop, args=(session, "by hand", "by hand"), daemon=True)
        running.start()
        running.join(timeout=20)
        assert not running.is_alive()
        assert not session.in_episode


@pytest.mark.real_time
def test_nothing_is_recorded_of_a_start_that_is_refused(servos: SimulatedServos, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with by_keys(without_leader(tmp_path), store=store) as (session, person):
        recorder = session._recorder
        assert recorder is not None
        session.control.stop("a person is near")
        for _ in range(2):
            with pytest.raises(ValueError, match=r"stopped: a person is near|s old"):
                session.begin("refused", task="refused")
        session.end(success=True)  # of no episode
        assert session.status() == "no episode; 0 recorded ; a person is near"
        session.resume()
        session.begin("by hand", task="by hand")
        hold("q", person, 1.5)
        session.end(success=True)
        wait(lambda: recorder.recorded == 1)
        assert recorder.problem == ""
    (entry,) = EpisodeStore(store).select()
    assert EpisodeStore(store).read(entry.id).instruction == "by hand"


def test_a_session_that_fails_leaves_no_recorder(servos: SimulatedServos, tmp_path: Path) -> None:
    robot, options = load_robot(without_leader(tmp_path)), OPTIONS | {"control_hz": 20.0}
    before = {thread.name for thread in threading.enumerate()}
    with (
        typed("") as stream,
        pytest.raises(ValueError, match="command_rate 50 Hz must be a multiple"),
        teleop_session(robot, leader="", stream=stream, store=tmp_path / "store", **options),
    ):
        """Never opened."""
    wait(lambda: {thread.name for thread in threading.enumerate()} <= before | {"keyboard"})


class StillLeader:
    """A leader that says nothing."""

    problem = "it is silent"

    def action(self, joints: object) -> None:
        return None


class Log:
    """What was recorded: the step of each observation, and the number of actions."""

    def __init__(self) -> None:
        self.observed: list[int] = []
        self.actions = 0

    def observation(self, step: int, images: object, state: object) -> None:
        self.observed.append(step)

    def action(self, action: object, actor: int) -> None:
        self.actions += 1


def test_a_person_moves_and_records_nothing_while_a_camera_is_dead() -> None:
    camera, log, held = FakeCamera(), Log(), LeaderAt(np.full(6, 0.1, np.float32))
    embodiment = JointPositions([(-1.0, 1.0)] * 6)
    source = HumanSource(held, embodiment, camera, log, image_size=(4, 4), max_image_age_s=1.0)
    source.begin_episode()

    def run(first_tick: int, taken_s: float | None) -> None:
        camera.newest_s = taken_s
        for tick in range(first_tick, first_tick + 10):
            action = source.action(tick, Measurement([0.0] * 6, time.monotonic()), 0)
            source.observe()
            if action is not None:
                source.executed(tick, action.values)

    run(0, None)
    assert source.problem == "no image from some camera"
    run(10, time.monotonic() - 60.0)
    assert source.problem.startswith("images are 60.")
    assert (log.observed, log.actions) == ([], 0)
    run(20, time.monotonic())
    assert (source.problem, log.observed, log.actions) == ("", [0, *range(9)], 9)
    run(30, time.monotonic() - 60.0)
    assert (len(log.observed), log.actions) == (10, 10)  # the action before its observation was missed
    source.observe(Measurement([0.0] * 6, time.monotonic()))
    assert len(log.observed) == 10
    assert source.problem.startswith("images are 60.")


def test_a_state_that_is_no_number_is_not_recorded() -> None:
    camera, log, held = FakeCamera(), Log(), LeaderAt(np.full(6, 0.1, np.float32))
    camera.newest_s = time.monotonic()
    embodiment = JointPositions([(-1.0, 1.0)] * 6)
    source = HumanSource(held, embodiment, camera, log, image_size=(4, 4), max_image_age_s=60.0)
    source.begin_episode()
    source.observe(Measurement([0.0] * 5 + [float("nan")], 0.0))
    assert log.observed == []
    source.observe(Measurement([0.0] * 6, 0.0))
    assert log.observed == [0]


def program(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.real_robot.driven_by_keys", *map(str, arguments)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)


def test_a_recording_that_cannot_begin_ends_with_its_error(tmp_path: Path) -> None:
    with program(without_leader(tmp_path), 20.0, tmp_path / "store", stderr=subprocess.PIPE) as recording:
        try:
            assert "command_rate 50 Hz must be a multiple" in recording.communicate(timeout=60)[1]
        finally:
            recording.kill()


@pytest.mark.real_time
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM])
def test_a_signal_to_end_in_motion_brakes_the_arm(tmp_path: Path, number: signal.Signals) -> None:
    goals: list[float] = []
    with program(without_leader(tmp_path), 25.0) as driving:
        try:
            assert driving.stdin is not None
            assert driving.stdout is not None
            lines = (line for line in driving.stdout if line.startswith("sent"))
            reading = threading.Thread(target=lambda: goals.extend(float(line.split()[1]) for line in lines))
            reading.start()
            until = time.monotonic() + 60.0
            while not goals and time.monotonic() < until:  # refused until the joints are known
                print("n", end="", file=driving.stdin, flush=True)
                time.sleep(0.2)
                assert driving.poll() is None
            while goals[-1] < goals[0] + 5.0 and time.monotonic() < until:
                print("q", end="", file=driving.stdin, flush=True)
                time.sleep(0.03)
            driving.send_signal(number)
            driving.send_signal(number)  # from the shell and from the kernel
            driving.wait(timeout=30)
            reading.join()
        finally:
            driving.kill()
    steps = np.abs(np.diff(goals))
    assert steps.max() > 0.2  # degrees in 20 ms
    assert steps[-3:].max() < 0.05


class LeaderAt:
    """A leader arm that lies where its joints are the action ``values`` [6]."""

    problem = ""

    def __init__(self, values: np.ndarray | None) -> None:
        self.values = values

    def action(self, joints: object) -> np.ndarray | None:
        return self.values


@pytest.mark.real_time
def test_a_leader_that_was_silent_is_followed_slowly_at_first(servos: SimulatedServos, tmp_path: Path) -> None:
    """It may be back elsewhere, as at the begin of an episode."""
    robot, leader = load_robot(so101(tmp_path)), LeaderAt(np.full(6, 0.8, np.float32))
    servos.at = servos.goal = np.zeros(6)
    session: teleop.TeleopSession
    with LeRobotArm(servos, robot) as arm, typed("") as stream:
        connection = LeRobotConnection(arm, after_tick=lambda now_s: session.after_tick(now_s))
        session = teleop.TeleopSession(
            robot, connection, leader, embodiment=robot.embodiment(), stream=stream, recorder=None, **OPTIONS
        )
        wait(lambda: arm.fresh(0.1))
        session.begin("follow", task="follow")
        for there in (0.0, 85.0):  # degrees, at 0.8 and -0.8
            moved = len(servos.sent)
            wait(lambda there=there: abs(servos.goal[0] - there) > 1.0)  # type: ignore[misc]
            time.sleep(0.6)
            assert 1.0 < abs(servos.goal[0] - there) < 40.0
            assert len(servos.sent) > moved
            wait(lambda: abs(abs(servos.goal[0]) - 88.0) < 0.5)
            leader.values = None
            time.sleep(1.5)
            leader.values = np.full(6, -0.8, np.float32)
        session.end(success=False)
        session.close()


@pytest.mark.real_time
def test_c_outside_an_episode_undoes_a_stop_and_moves_nothing(servos: SimulatedServos, tmp_path: Path) -> None:
    robot = load_robot(so101(tmp_path))
    with LeRobotArm(servos, robot) as arm, typed("") as stream:
        session = teleop.TeleopSession(
            robot, LeRobotConnection(arm), LeaderAt(np.full(6, 0.1, np.float32)), embodiment=robot.embodiment(),
            stream=stream, recorder=None, **OPTIONS,
        )  # fmt: skip
        wait(lambda: arm.fresh(0.1))
        for between in ("before", "after"):
            sent = len(servos.sent)
            for key in " cc":
                teleop._do(session, key, "follow", "follow")
            assert not session.control.loop.filter.stopped
            time.sleep(0.5)
            assert len(servos.sent) == sent, between
            session.begin("follow", task="follow")
            time.sleep(0.5)
            assert len(servos.sent) > sent
            session.end(success=False)
            time.sleep(0.5)
        session.close()


def test_with_a_leader_no_key_moves_the_arm(servos: SimulatedServos, tmp_path: Path) -> None:
    robot, keys = load_robot(so101(tmp_path)), string.ascii_lowercase
    embodiment = robot.embodiment()
    with LeRobotArm(servos, robot) as arm, typed(keys) as stream:
        session = teleop.TeleopSession(
            robot, LeRobotConnection(arm), StillLeader(), embodiment=embodiment, stream=stream, recorder=None,
            **OPTIONS,
        )  # fmt: skip
        session.keyboard._thread.join()
        assert "".join(session.keyboard.commands) == keys
        assert session.keyboard.motions == ""
        session.close()


def pressed(key: str, sent: list[float]) -> list[float]:
    """The action of a Panda that was sent to the joints ``sent``, for a key."""
    axes = load_robot(ROBOTS / "fake_arm.yaml").limits.axes
    panda = PandaEndEffector(axes)
    with typed(key) as stream:
        keys = teleop.KeyboardInput(stream, panda.action_dim)
        keys._thread.join()
    motion = teleop.KeyboardMotion(keys, panda, position_dimensions(panda, axes), sent=lambda: sent, control_hz=20.0)
    action = motion.action([*START_JOINTS, 0.02])  # where the fingers are does not matter: they press on an object
    assert action is not None
    return list(action.tolist())


def test_the_gripper_stays_closed_while_keys_move_the_arm() -> None:
    step = 0.4 / 20.0
    assert pressed("q", [*START_JOINTS, 0.0]) == pytest.approx([0.5, 0, 0, 0, 0, 0, 1.0])
    assert pressed("d", [*START_JOINTS, 0.01]) == pytest.approx([0, 0, -0.5, 0, 0, 0, 0.5])
    assert pressed("u", [*START_JOINTS, 0.01]) == pytest.approx([0, 0, 0, 0, 0, 0, 0.5 + step])
    assert pressed("j", [*START_JOINTS, 0.01]) == pytest.approx([0, 0, 0, 0, 0, 0, 0.5 - step])


POSITIONS: dict[str, tuple[str, Callable[[int], list[int]]]] = {
    "so101": ("joint_positions", lambda dims: list(range(dims))),
    "fake_arm": ("panda_end_effector", lambda dims: [dims - 1]),
    "ur5e": ("joint_steps", lambda dims: []),
}


@pytest.mark.parametrize("file", POSITIONS)
def test_dimensions_that_are_positions_are_known(file: str) -> None:
    robot, (name, expected) = load_robot(ROBOTS / f"{file}.yaml"), POSITIONS[file]
    assert robot.control.embodiment == name
    embodiment = robot.embodiment()
    assert position_dimensions(embodiment, robot.limits.axes) == expected(embodiment.action_dim)
