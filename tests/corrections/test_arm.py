"""The page on an arm of LeRobot with simulated servos: through lease, safety filter and driver, in real time.

The same on an arm of ROS, over a real wire: tests/ros/test_corrections.py.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from PIL import Image
from playwright.sync_api import Browser
from websockets.sync.client import ClientConnection

from episodes.formats.images import fit_image
from episodes.schema import HUMAN, POLICY, Episode
from episodes.store import EpisodeStore
from policies.bundle import save_bundle
from policies.policy import RobotSpec
from real_robot.corrections.arm import ArmEnv
from real_robot.corrections.server import CorrectionServer
from real_robot.lerobot.arm import LeRobotArm, LeRobotConnection
from real_robot.robot_file import RobotError, load_robot
from tests.browser import needs_chromium, wait_until
from tests.corrections.scripted_operator import open_control, open_session
from tests.corrections.small_server import PATIENT
from tests.real_robot.lerobot_plugins.simulated_device import JOINTS, SimulatedServos
from tests.real_robot.small_policies import small_policy
from tests.real_robot.test_control_loop import FakeCamera
from tests.real_robot.test_control_thread import wait
from tests.real_robot.test_lerobot import so101
from vla_rl.cli import main as cli
from vla_rl.config.corrections import CorrectionsConfig
from vla_rl.runners.corrections import serving_arm

pytestmark = pytest.mark.real_time

SPEC = RobotSpec(action_dim=6, state_dim=6, cameras=("agent",), image_size=(32, 32), control_hz=10.0)
SETTINGS = replace(PATIENT, held=(), speed=1.0)
PAN_RANGE = 1.91986  # [rad] that a state of 1 stands for
LATE = 0.07  # [rad] by which an observation may be off: the arm moves on while it is taken
MOVED = 0.4  # [rad] by which a person's motion must be observed
STEP = 0.1  # [rad] of a full action: 1 rad/s, more than the limits allow
SPEED = 0.5  # [rad/s] limit of the first joint: slow, so that a late observation is not far off
SENT_LATE_S, TRIES = 0.1, 8  # on a busy machine


def robot_file(folder: Path) -> Path:
    """The SO-101, slow, with motions as actions, and images that a loaded machine may take late."""
    path = so101(folder)
    document = yaml.safe_load(path.read_text())
    document["limits"]["joints"]["shoulder_pan"]["velocity"] = f"{SPEED} rad/s"
    steps = dict.fromkeys(JOINTS, f"{STEP} rad")
    document["control"] |= {"embodiment": "joint_steps", "joint_step": steps, "max_image_age_s": 1.0}
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def bundle(folder: Path, robot: RobotSpec = SPEC, actions: torch.Tensor | None = None) -> Path:
    policy = small_policy(robot=robot)
    policy.fit_normalizer(torch.randn(100, 6), 0.1 * torch.randn(100, 6) if actions is None else actions)
    save_bundle(policy, folder / "given")
    return folder / "given"


@pytest.fixture
def servos(monkeypatch: pytest.MonkeyPatch) -> SimulatedServos:
    """In place of LeRobot's driver, which needs LeRobot."""
    made = SimulatedServos()
    monkeypatch.setattr("real_robot.arm_connection.make_driver", lambda section: made)
    return made


@pytest.fixture
def running(tmp_path: Path, servos: SimulatedServos) -> Iterator[CorrectionServer]:
    config = CorrectionsConfig(control=SETTINGS)
    file = robot_file(tmp_path)
    with serving_arm(bundle(tmp_path), config, tmp_path / "out", robot=file, instruction="wave") as server:
        yield server
    assert server.robot.failure is None


class Stopped(Exception):
    """The arm stopped in a motion: its loop had no processor for longer than its commands reach."""


class Page:
    """The control connection of a person."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._send(type="acquire")
        self._token = self.receive("lease")["token"]

    def do(self, what: str) -> None:
        self._send(type="do", token=self._token, what=what)

    def drive_until(self, keys: list[str], condition: Callable[[dict], bool]) -> dict:
        """Hold these keys, with the deadman if there are any. Stopped where the arm asks for a new episode."""
        deadline_s = time.monotonic() + 60
        while not condition(state := self.receive("state")):
            assert time.monotonic() < deadline_s, state
            if "begin one from here" in state["reason"]:
                raise Stopped(state["reason"])
            self._send(type="input", token=self._token, deadman=bool(keys), keys=keys)
        return state

    def receive(self, wanted: str) -> dict:
        while True:
            message = json.loads(self._socket.recv(timeout=60))
            if message["type"] == wanted:
                return message

    def _send(self, **message: object) -> None:
        self._socket.send(json.dumps(message))


def last_episode(running: CorrectionServer) -> Episode:
    assert running.robot.session.last_episode is not None
    with EpisodeStore(running.folder / "episodes") as store:
        return store.read(running.robot.session.last_episode)


def motion_of(episode: Episode) -> tuple[float, float, int]:
    """Of the first joint while the person drove [rad]: by the actions and by what was seen; in so many steps."""
    human = np.flatnonzero(episode.actor == HUMAN)
    seen = dict(zip(episode.observation_steps.tolist(), episode.state[:, 0] * PAN_RANGE, strict=True))
    first, last = (find(step for step in seen if step in human) for find in (min, max))
    return STEP * float(episode.action[first:last, 0].sum()), seen[last] - seen[first], last - first


def drive_and_take_over(page: Page, key: str) -> None:
    page.do("hand_back")
    page.drive_until([], lambda state: state["actors"].count("p") >= 10)
    page.do("take_over")
    page.drive_until([key], lambda state: state["actors"].count("h") >= 12)
    page.drive_until([], lambda state: state["actors"].endswith("-"))


def test_an_image_that_cannot_be_read_leads_to_a_hold(
    running: CorrectionServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    truncated = io.BytesIO()
    Image.fromarray(np.zeros((48, 64, 3), dtype=np.uint8)).save(truncated, "jpeg")
    faults = [truncated.getvalue()[:-200]]

    def fitted(image: np.ndarray, size: Sequence[int]) -> torch.Tensor:
        if faults:
            Image.open(io.BytesIO(faults.pop())).load()
        return fit_image(image, size)

    with open_control(*open_session(running.invite("Anna"))) as socket:
        page = Page(socket)
        page.do("hand_back")
        page.drive_until([], lambda state: state["step"] >= 3)
        monkeypatch.setattr("real_robot.lerobot.arm.fit_image", fitted)
        state = page.drive_until([], lambda state: state["mode"] == "hold")
        assert state["reason"].startswith("an image cannot be read: ")
        page.do("hand_back")
        page.drive_until([], lambda later: later["step"] > state["step"] + 2)


def test_a_person_drives_an_arm_from_the_page_and_its_limits_are_recorded(
    running: CorrectionServer, servos: SimulatedServos
) -> None:
    session = running.robot.session
    with open_control(*open_session(running.invite("Anna"))) as socket:
        page = Page(socket)
        state = page.drive_until([], lambda state: state["step"] == 0)
        assert (state["mode"], state["reason"], state["can_rewind"]) == ("hold", "a new episode", False)
        wait(lambda: bool(servos.sent))
        assert not any(np.ptp([goal for _, goal in servos.sent], axis=0))
        tries = list[tuple[float, float, int]]()
        # a busy machine stops the arm, or observes late or little: the person begins again, and drives joint 0 back
        for number, key in zip(range(1, TRIES + 1), itertools.cycle(["KeyS", "KeyW"]), strict=False):
            with contextlib.suppress(Stopped):
                drive_and_take_over(page, key)
                page.do("success")
                page.drive_until([], lambda state: state["mode"] == "ended")
                length, episode = session.attempt.length, last_episode(running)
                moved, seen, steps = motion_of(episode)
                tries.append((moved, seen, steps))
                if abs(moved - seen) <= LATE and abs(moved) > MOVED:
                    break
            if session.mode != "ended":
                page.do("abort")
                page.drive_until([], lambda state: state["mode"] == "ended")
            page.do("next")
            page.drive_until([], lambda state, following=number + 1: state["episode"] == following)
        else:
            pytest.fail(f"in {TRIES} tries no motion was observed as it was recorded (recorded, seen, steps): {tries}")
        page.do("next")
        state = page.drive_until([], lambda state: state["episode"] == number + 1)
        assert (state["mode"], state["step"]) == ("hold", 0)
        page.do("rewind")
        assert "cannot go back" in page.receive("refused")["reason"]
    with EpisodeStore(running.folder / "episodes") as store:
        assert store.labels(episode.id)["success"] is True
    assert (episode.num_steps, episode.instruction, episode.split) == (length, "wave", "robot")
    assert set(episode.actor[:10]) == {POLICY}
    # the recorded actions are the motion that was seen, at a lower speed than the person wanted
    assert moved == pytest.approx(seen, abs=LATE)
    assert MOVED < abs(moved) < 0.9 * STEP * steps
    assert episode.observation_steps[0] == 0
    assert episode.observation_steps[-1] == episode.num_steps
    # the speed limit holds, whoever drove, over a command and over 25; a goal may be sent late
    times, goals = np.array([at for at, _ in servos.sent]), np.radians([goal for _, goal in servos.sent])
    for commands in (1, 25):
        took, turned = times[commands:] - times[:-commands], goals[commands:, 0] - goals[:-commands, 0]
        assert (np.abs(turned) <= SPEED * (took + SENT_LATE_S)).all()


def test_a_policy_acts_as_late_after_its_observations_as_it_was_trained(
    tmp_path: Path, servos: SimulatedServos
) -> None:
    """The policy turns the first joint at a constant speed, so that a state says after which step it was observed."""
    delay, turns = 3, 0.07  # not to the end of the joint in all tries
    actions = 1e-4 * torch.randn(100, 6) + torch.tensor([turns, 0.0, 0.0, 0.0, 0.0, 0.0])
    given = bundle(tmp_path, replace(SPEC, action_delay=delay), actions)
    config, file = CorrectionsConfig(control=SETTINGS), robot_file(tmp_path)
    with serving_arm(given, config, tmp_path / "out", robot=file, instruction="wave") as server:
        session = server.robot.session
        assert session.arm.ask_steps == 1  # of three control steps, the lead takes one and an action one
        with open_control(*open_session(server.invite("Anna"))) as socket:
            page, late = Page(socket), list[float]()
            for number in range(1, TRIES + 1):  # on a busy machine chunks come too late, and the arm rests in between
                with contextlib.suppress(Stopped):
                    drive_without_pause(page)
                page.do("failure")
                page.drive_until([], lambda state: state["mode"] == "ended")
                assert session.last_episode is not None
                with EpisodeStore(server.folder / "episodes") as store:
                    episode = store.read(session.last_episode)
                assert (episode.observation_steps[0], episode.observation_steps[-1]) == (0, episode.num_steps)
                assert episode.action_delay == delay
                late.append(delay_of(episode))
                if late[-1] > delay - 0.5:
                    break
                page.do("next")
                page.drive_until([], lambda state, following=number + 1: state["episode"] == following)
    assert delay - 0.5 < np.nanmax(late) < delay + 1.5, late
    assert abs(np.median(np.diff(episode.observation_steps[:-1])) - 4) <= 1  # of SETTINGS.execute_steps


def drive_without_pause(page: Page) -> None:
    """26 steps of the policy; started again after images that a loaded machine took late."""
    state = page.receive("state")
    while state["step"] < 26:
        if state["mode"] == "hold":
            page.do("hand_back")
        state = page.drive_until([], lambda state: state["step"] >= 26 or bool(state["reason"]))


def delay_of(episode: Episode) -> float:
    """Steps between what the arm had done when it was observed, by its first joint, and the step recorded for it."""
    turned = np.concatenate([[0.0], STEP * episode.action[:, 0].cumsum()])  # [rad] before each step
    seen = PAN_RANGE * (episode.state[:, 0] - episode.state[0, 0])
    begun = np.interp(seen, turned, np.arange(len(turned)))
    return float(np.median((episode.observation_steps - begun)[1:-1]))


@pytest.mark.parametrize("disk", ["free", "full"])
def test_the_arm_holds_when_the_page_is_closed_even_if_the_policy_drives(
    running: CorrectionServer, servos: SimulatedServos, disk: str, capfd: pytest.CaptureFixture[str]
) -> None:
    session = running.robot.session
    for drives in ("hand_back", "take_over"):
        with open_control(*open_session(running.invite("Anna"))) as socket:
            page = Page(socket)
            page.do(drives)
            page.drive_until(["KeyW"], lambda state: state["step"] >= 5 and state["mode"] != "hold")
            if disk == "full":
                with open("/dev/full", "w") as full:  # no line of the audit log can be written
                    os.dup2(full.fileno(), running.audit._file.fileno())
        wait(lambda: session.mode == "hold")
        assert session.reason == "the connection ended"
        time.sleep(0.5)
        length, goal = session.attempt.length, servos.goal
        time.sleep(0.5)
        assert (session.mode, session.attempt.length, servos.goal.tolist()) == ("hold", length, goal.tolist())
    said = capfd.readouterr().err.count("audit.jsonl: the audit log is incomplete: no space left on device")
    assert said == (disk == "full")


@needs_chromium
def test_a_stop_is_shown_in_the_page_and_released_there(
    chromium: Browser, running: CorrectionServer, servos: SimulatedServos
) -> None:
    context = chromium.new_context()
    with contextlib.closing(context):
        page = context.new_page()
        page.goto(running.invite("Anna"))
        page.wait_for_selector("#no-rewind:not([hidden])")
        assert not page.is_visible("#rewind")
        assert not page.is_visible("#stopped")
        page.keyboard.press("t")
        page.wait_for_selector("#mode[data-mode=human]")
        page.keyboard.down("Shift")
        page.keyboard.down("w")
        wait(lambda: running.robot.session.attempt.length > 5)
        arm = running.robot.session.arm
        assert isinstance(arm, ArmEnv)
        arm._control.stop("contact at joint elbow_flex")
        page.wait_for_selector("#stopped:not([hidden])")
        assert page.text_content("#stopped-reason") == "The arm is stopped: contact at joint elbow_flex."
        page.wait_for_selector("#mode[data-mode=hold]")
        length = running.robot.session.attempt.length
        page.keyboard.press("t")
        wait_until(page, "document.getElementById('problem').textContent.startsWith('stopped: contact')")
        page.click("#release_stop")
        page.wait_for_selector("#stopped", state="hidden")
        assert running.robot.session.attempt.length == length
        page.keyboard.press("t")
        wait(lambda: running.robot.session.attempt.length > length + 5)


def test_a_driver_that_fails_stops_the_arm_and_is_named(running: CorrectionServer, servos: SimulatedServos) -> None:
    with open_control(*open_session(running.invite("Anna"))) as socket:
        page = Page(socket)
        page.do("take_over")
        page.drive_until(["KeyW"], lambda state: state["step"] >= 5)
        servos.unplugged = True
        state = page.drive_until(["KeyW"], lambda state: state["mode"] == "hold")
        assert "no answer from motor 3" in page.drive_until([], lambda state: bool(state["stopped"]))["stopped"]
        assert state["reason"]


def test_an_arm_whose_images_are_old_or_of_the_future_does_not_move(tmp_path: Path, servos: SimulatedServos) -> None:
    robot = load_robot(robot_file(tmp_path))
    with LeRobotArm(servos, robot) as arm:
        connection = LeRobotConnection(arm)
        env = ArmEnv(robot, connection, SPEC, name="x", instruction="wave", max_steps=9, held=())
        with contextlib.closing(env):
            wait(lambda: not env.problem())
            connection.cameras = camera = FakeCamera()
            for taken_s, problem in (
                (time.monotonic() - 60.0, "images are 60."),
                (time.monotonic() + 60.0, "images are -5"),
                (None, "no image from some camera"),
            ):
                camera.newest_s = taken_s
                wait(lambda problem=problem: env.problem().startswith(problem))


def test_what_an_arm_cannot_do_is_refused_in_one_line(
    tmp_path: Path, servos: SimulatedServos, capsys: pytest.CaptureFixture[str]
) -> None:
    given, file = bundle(tmp_path), robot_file(tmp_path)
    robot = load_robot(file)
    with LeRobotArm(servos, robot) as arm:
        make = partial(ArmEnv, name="x", instruction="wave", max_steps=9, held=())
        other = replace(SPEC, state_dim=7)
        with pytest.raises(RobotError, match="made for another robot: state_dim 7, not 6"):
            make(robot, LeRobotConnection(arm), other)
        with pytest.raises(RobotError, match=r"action_delay of 1 control steps, but limits\.command_lead takes 1"):
            make(robot, LeRobotConnection(arm), replace(SPEC, action_delay=1))
        positions = replace(robot, control=replace(robot.control, embodiment="joint_positions"))
        with pytest.raises(RobotError, match="actions of joint_positions are positions"):
            make(positions, LeRobotConnection(arm), SPEC)
    for arguments, says in (
        ((), "--robot needs --instruction TEXT"),
        (("--instruction", "wave", "--control.pace", "2"), "are for simulators"),
        (("--instruction", "wave", "--task", "reach"), "--sim and --task choose a simulator"),
    ):
        with pytest.raises(SystemExit) as end:
            cli.main(["correct", str(given), "--robot", str(file), "--out", str(tmp_path / "out"), *arguments])
        said = capsys.readouterr().err
        assert (end.value.code, says in said, said.count("\n")) == (2, True, 1), said
