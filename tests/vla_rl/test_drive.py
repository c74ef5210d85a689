"""Driving the imagined robot beside the true one: the session, who is let in, and the page in a real Chromium."""

from __future__ import annotations

import dataclasses
import http.client
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from real_robot.corrections.human_input import RawInput
from real_robot.corrections.settings import ControlSettings
from real_robot.corrections.web import Address
from sims.errors import UserError
from sims.vector_env import Step
from tests import dot_episodes
from tests.browser import TIMEOUT_MS, needs_chromium, wait_until
from tests.corrections.scripted_operator import open_session
from vla_rl.drive.server import DriveServer, serving
from vla_rl.drive.session import DriveSession
from vla_rl.runners.world_model import recorded_limits
from world_models.bundle import FittedWorldModel, load_world_model, save_world_model
from world_models.data.clip_sampler import ClipSampler
from world_models.evaluation.action_sequences import startable
from world_models.evaluation.divergence import Divergence, reference_image_difference
from world_models.training.dynamics import DynamicsFit, DynamicsFitConfig
from world_models.training.kinematics import KinematicsFit

CONTROL = ControlSettings(held=(), view="behind", speed=0.25, stale_input_s=2.0, lost_person_s=8.0)
RIGHT = RawInput(deadman=True, keys=frozenset({"KeyW"}))  # by half a pixel per step


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> ClipSampler:
    return ClipSampler([dot_episodes.store(tmp_path_factory.mktemp("dots") / "store")], action_horizon=4)


@pytest.fixture(scope="module")
def fitted(clips: ClipSampler, tmp_path_factory: pytest.TempPathFactory) -> FittedWorldModel:
    """Knows in which direction the dot goes, not exactly where."""
    dynamics, reward_model = dot_episodes.models()
    dynamics.fit_scales(*clips.statistics())
    dot_episodes.finish(KinematicsFit(dynamics, clips, seed=0, steps=100))
    config = DynamicsFitConfig(steps=30, batch_size=8, learning_rate=5e-3, warmup=5)
    dot_episodes.finish(DynamicsFit(dynamics, config, clips, seed=0))
    path = tmp_path_factory.mktemp("fit") / "world.safetensors"
    save_world_model(dynamics.eval(), reward_model, path, reference_error=1.0, metrics={}, reward_every=2)
    return load_world_model(path)


def make_session(
    fitted: FittedWorldModel, clips: ClipSampler, env: dot_episodes.DotEnv | None, reference: float | None = None
) -> DriveSession:
    reference = reference_image_difference(fitted.dynamics, clips, seed=0) if reference is None else reference
    divergence = Divergence(reference_image_difference=reference, locate=None)
    limits = recorded_limits(clips.entries) if env is None else env.spec.limits
    session = DriveSession(fitted, clips, divergence, env, CONTROL, limits=limits)
    session.begin(0)
    return session


def test_both_robots_get_the_same_actions_and_go_back_together(fitted: FittedWorldModel, clips: ClipSampler) -> None:
    env = dot_episodes.DotEnv(max_steps=30)
    session = make_session(fitted, clips, env)
    start = env.position
    for _ in range(6):
        session.step(RIGHT)
    assert env.position == start + 3
    said = [session.moment(step) for step in range(7)]
    assert said[0]["difference"] == 0.0  # the same start
    assert max(one["difference"] for one in said) > 0
    session.rewind(2)
    assert (session.steps, env.position) == (2, start + 1)
    for _ in range(4):
        session.step(RIGHT)
    assert [session.moment(step) for step in range(7)] == said
    while not session.ended:
        session.step(RIGHT)
    last = session.moment(session.steps)
    assert last["true_success"] is True
    assert last["ended"] == "the simulator's episode is over"
    with pytest.raises(UserError, match=r"there are \d+ steps, so none after step 99"):
        session.rewind(99)


def test_where_they_part_is_told(fitted: FittedWorldModel, clips: ClipSampler) -> None:
    session = make_session(fitted, clips, dot_episodes.DotEnv(), reference=0.2)
    for _ in range(8):
        session.step(RIGHT)
    said = [session.moment(step) for step in range(9)]
    assert [one["divergence"] for one in said] == ["image" if one["difference"] > 0.2 else None for one in said]
    assert said[0]["divergence"] is None
    assert said[-1]["divergence"] == "image"


def test_the_time_is_over_where_the_simulators_is(fitted: FittedWorldModel, clips: ClipSampler) -> None:
    """Its task's limit, not the longest one of all tasks: it would stand still."""
    env = dot_episodes.DotEnv(max_steps=5)
    session = make_session(fitted, clips, env)
    assert session.max_steps == session.about()["max_steps"] == 5
    session = DriveSession(fitted, clips, session._divergence, env, CONTROL, limits={"go": 30})
    session.begin(0)
    for _ in range(5):
        assert session.ended == ""
        session.step(RawInput(deadman=True))
    assert session.moment(5)["ended"] == "the time is over"


def test_parts_of_a_recording_start_where_the_simulator_can_be_reset_to(
    fitted: FittedWorldModel, tmp_path: Path
) -> None:
    """Beside the simulator those that begin later start nothing; without it they all do."""
    store = dot_episodes.store(tmp_path / "dots", 3)
    first, second, _ = (entry.id for entry in store.entries())
    for id in (first, second):
        store.split(id, 3, author="anna")
    clips = ClipSampler([store], action_horizon=4)
    for env, count in ((dot_episodes.DotEnv(), 3), (None, 5)):
        session = make_session(fitted, clips, env)
        starts = startable(clips, env)
        assert session.about()["episodes"] == len(starts) == count
        for number, i in enumerate([*starts, starts[0]]):
            session.begin(number)
            assert session.about()["episode"] == number % count
            assert torch.equal(session._imagined.moments[0].history.state[0], clips.clip(i, 0, 0).state[0])
    for entry in store.select():
        if entry.first == 0:
            store.delete(entry.id, author="anna")
    with pytest.raises(UserError, match="none of the 2 episodes begins where its recording does"):
        make_session(fitted, ClipSampler([store], action_horizon=4), dot_episodes.DotEnv())


class FailingEnv(dot_episodes.DotEnv):
    """Its simulator fails in the second step."""

    def step(self, action: torch.Tensor) -> Step:
        step, no = super().step(action), torch.zeros(1, dtype=torch.bool)
        return step if self.elapsed < 2 else dataclasses.replace(step, valid=no, truncated=~no, terminated=no)


def test_a_simulator_that_fails_is_not_taken_for_the_end_of_the_time(
    fitted: FittedWorldModel, clips: ClipSampler
) -> None:
    session = make_session(fitted, clips, FailingEnv())
    for _ in range(2):
        assert session.ended == ""
        session.step(RIGHT)
    assert session.ended == "the simulator failed; begin again"


def test_without_a_simulator_the_imagined_robot_is_alone(fitted: FittedWorldModel, clips: ClipSampler) -> None:
    session = make_session(fitted, clips, None)
    assert session.about()["rows"] == ["imagined"]
    longest = max(entry.steps for entry in clips.entries)
    for _ in range(longest):
        session.step(RIGHT)
    moment = session.moment(longest)
    assert (moment["true_success"], moment["difference"], moment["ended"]) == (None, None, "the time is over")


def test_what_does_not_fit_is_refused(fitted: FittedWorldModel, clips: ClipSampler) -> None:
    session = make_session(fitted, clips, dot_episodes.DotEnv(can_capture=False))
    session.step(RIGHT)
    with pytest.raises(UserError, match="dot cannot go back to an earlier state"):
        session.rewind(0)
    other = dot_episodes.DotEnv()
    other.spec = dataclasses.replace(other.spec, tasks=("fly",))
    with pytest.raises(UserError, match="the episodes' task 'go' is not one of the simulator's"):
        make_session(fitted, clips, other)
    other.spec = dataclasses.replace(other.spec, state_dim=3)
    with pytest.raises(UserError, match="the simulator does not fit the world model"):
        make_session(fitted, clips, other)


# -- the server -----------------------------------------------------------------------------------------------------


@contextmanager
def server(fitted: FittedWorldModel, clips: ClipSampler, folder: Path) -> Iterator[DriveServer]:
    session = make_session(fitted, clips, dot_episodes.DotEnv())
    with serving(session, folder, episode=1, address=Address()) as running:
        yield running
        assert running.worker.failure is None


@pytest.fixture(scope="module")
def running(
    fitted: FittedWorldModel, clips: ClipSampler, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[DriveServer]:
    with server(fitted, clips, tmp_path_factory.mktemp("server")) as one:
        yield one


def open_drive(running: DriveServer, **headers: str) -> ClientConnection:
    url = running.origins.origins[0].replace("http", "ws") + "/ws/drive"
    return connect(url, additional_headers={"Origin": running.origins.origins[0]} | headers)


def test_only_the_page_of_the_printed_address_gets_in(running: DriveServer) -> None:
    connection = http.client.HTTPConnection(f"127.0.0.1:{running.origins.port}", timeout=60)
    for path in ("/", "/?token=wrong"):
        connection.request("GET", path)
        assert connection.getresponse().read() != b""
        connection.request("GET", path)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == 401
    connection.close()
    address = running.invite()
    _, cookie = open_session(address)
    with pytest.raises(ValueError, match="401"):
        open_session(address)  # a token works once
    for origin in ("http://evil.example", "null"):
        with pytest.raises(InvalidStatus) as refused:
            open_drive(running, Cookie=cookie, Origin=origin)
        assert refused.value.response.status_code == 403
    with open_drive(running) as socket, pytest.raises(ConnectionClosed) as closed:
        socket.recv(timeout=60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4401


def test_wrong_messages_are_refused_and_a_second_window_takes_over(running: DriveServer) -> None:
    _, cookie = open_session(running.invite())
    with open_drive(running, Cookie=cookie) as first:
        about = json.loads(first.recv(timeout=60))
        assert (about["type"], about["episode"], about["rows"]) == ("episode", 1, ["true", "imagined", "difference"])
        assert json.loads(first.recv(timeout=60))["step"] == 0
        for message, reason in (
            ({"type": "input", "deadman": True, "keys": [1]}, "valid string"),
            ({"type": "rewind", "step": 5}, "there are 0 steps"),
            ({"type": "begin", "episode": -1}, "greater than or equal to 0"),
        ):
            first.send(json.dumps(message))
            assert reason in json.loads(first.recv(timeout=60))["reason"]
        with open_drive(running, Cookie=cookie) as second:
            assert json.loads(second.recv(timeout=60))["type"] == "episode"
            with pytest.raises(ConnectionClosed) as closed:
                first.recv(timeout=60)
    assert closed.value.rcvd is not None
    assert closed.value.rcvd.code == 4409


# -- the page -------------------------------------------------------------------------------------------------------


def pixels(page: Page, row: str) -> np.ndarray:
    """What a canvas shows, [height, width, 4]."""
    script = """id => {
      const canvas = document.getElementById(id);
      return [canvas.height, [...canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data]];
    }"""
    height, data = page.evaluate(script, f"image-{row}")
    return np.array(data, dtype=np.uint8).reshape(height, -1, 4)


def dot(image: np.ndarray) -> float:
    """The column of the red dot in the upper camera's image."""
    upper = image[: dot_episodes.SIZE].astype(float)
    redness = (upper[..., 0] - upper[..., 1] - 40).clip(0).sum(0)
    return float(redness @ np.arange(len(redness)) / redness.sum())


@needs_chromium
def test_a_person_drives_scrubs_goes_back_and_begins_again(chromium: Browser, running: DriveServer) -> None:
    phone = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True, "color_scheme": "dark"}
    errors: list[str] = []
    with chromium.new_context(**phone) as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.set_default_timeout(TIMEOUT_MS)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(running.invite())
        wait_until(page, "document.getElementById('image-true')?.dataset.step === '0'")
        at_start = dot(pixels(page, "true"))
        assert np.abs(pixels(page, "true").astype(int) - pixels(page, "imagined")).max() <= 8  # the same start, as JPEG

        page.keyboard.down("w")
        page.wait_for_timeout(200)
        assert page.get_attribute("#at", "max") == "0"  # without the deadman time stands still
        page.keyboard.down("Shift")
        wait_until(page, "Number(document.getElementById('at').max) >= 6")
        page.keyboard.up("Shift")
        page.keyboard.up("w")
        page.reload()  # shows all of it again; what the robot still did until it heard of the release comes no more
        at_last = "document.getElementById('image-true')?.dataset.step === document.getElementById('at').max"
        wait_until(page, f"Number(document.getElementById('at').max) >= 6 && {at_last}")
        steps, seen = int(page.get_attribute("#at", "max") or 0), dot(pixels(page, "true"))
        assert seen == pytest.approx(at_start + steps / 2, abs=1.5)
        assert (page.text_content("#mode") or "") == "Hold Shift and drive"
        assert "Uncertainty" in (page.text_content("#about") or "")
        assert "steps; at the last one uncertainty" in (page.get_attribute("#chart", "aria-label") or "")

        page.focus("#at")
        page.keyboard.press("Home")
        wait_until(page, "document.getElementById('image-true').dataset.step === '0'")
        assert dot(pixels(page, "true")) == pytest.approx(at_start, abs=0.5)
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        page.click("#rewind")
        wait_until(page, "document.getElementById('at').max === '2'")
        page.keyboard.press("n")
        wait_until(page, "document.getElementById('about').textContent.startsWith('Start 3 of')")
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        found = Axe().run(page).response["violations"]
        assert [one["id"] for one in found if one["impact"] in ("serious", "critical")] == []
    assert errors == []
