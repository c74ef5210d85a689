"""A real server and real connections: who is let in and may do what, two clients, damaged frames, a correction."""

import http.client
import json
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from episodes.schema import HUMAN, POLICY
from episodes.store import EpisodeStore
from policies.bundle import bundle_version, load_bundle, read_bundle_info, save_bundle
from policies.residual.policy import ResidualConfig, residual_on
from real_robot.corrections.human_input import RawInput
from real_robot.corrections.lease import Holder
from real_robot.corrections.server import CorrectionServer
from real_robot.corrections.session import Refused
from real_robot.corrections.success_classifier import ClassifierFits
from real_robot.serving.backends import UNGUIDED
from sims.errors import UserError
from sims.vector_env import StartState
from tests.corrections.scripted_operator import ScriptedOperator, TakeOverAfter, open_control, open_session
from tests.corrections.small_server import SIM, server, write_bundle
from tests.episodes.episode_examples import make_episode
from tests.real_robot.test_control_thread import wait


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CorrectionServer]:
    with server(tmp_path_factory.mktemp("server"), pace=0.5) as one:
        yield one


def ask(
    running: CorrectionServer, path: str, *, method: str = "GET", cookie: str | None = None, **headers: str
) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection(f"127.0.0.1:{running.origins.port}", timeout=60)
    if cookie is not None:
        headers["Cookie"] = cookie
    connection.request(method, path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def wait_for(socket: ClientConnection, wanted: str) -> dict:
    """The next message of this type."""
    while True:
        message = json.loads(socket.recv(timeout=60))
        if message["type"] == wanted:
            return message


def closing(socket: ClientConnection) -> tuple[int, str]:
    """Code and reason with which the server closes the connection."""
    with pytest.raises(ConnectionClosed) as closed:
        list(socket)
    assert closed.value.rcvd is not None
    return closed.value.rcvd.code, closed.value.rcvd.reason


def test_a_token_is_exchanged_once_for_a_cookie_that_scripts_cannot_read(running: CorrectionServer):
    address = urlsplit(running.invite("Anna"))
    assert ask(running, "/")[0] == 401
    assert ask(running, "/?token=wrong")[0] == 401
    connection = http.client.HTTPConnection(address.netloc, timeout=60)
    connection.request("GET", f"/?{address.query}")
    answer = connection.getresponse()
    assert (answer.status, answer.getheader("Location")) == (303, "/")
    cookie = answer.getheader("Set-Cookie") or ""
    assert "HttpOnly" in cookie
    assert "SameSite=lax" in cookie
    connection.close()
    assert ask(running, f"/?{address.query}")[0] == 401  # replayed
    value = cookie.partition(";")[0]
    status, page = ask(running, "/", cookie=value)
    assert (status, b"<title>Corrections</title>" in page) == (200, True)
    assert json.loads(ask(running, "/api/me", cookie=value)[1]) == {"name": "Anna", "role": "operator"}
    assert ask(running, "/api/me", cookie="made up")[0] == 401
    events = [json.loads(line) for line in (running.folder / "audit.jsonl").read_text().splitlines()]
    assert {"token refused", "session begins"} <= {event["event"] for event in events}


def test_other_origins_and_hosts_are_refused(running: CorrectionServer):
    origin, cookie = open_session(running.invite())
    url = origin.replace("http", "ws") + "/ws/control"
    headers = {"Cookie": cookie}
    for wrong in ({"Origin": "http://evil.example"}, {"Origin": "null"}, {}):
        with pytest.raises(InvalidStatus) as refused:
            connect(url, additional_headers=headers | wrong)
        assert refused.value.response.status_code == 403
    assert ask(running, "/", cookie=cookie, Host="evil.example")[0] == 403
    assert ask(running, "/api/rollback", method="POST", cookie=cookie)[0] == 403
    assert ask(running, "/api/rollback", method="POST", cookie=cookie, Origin="http://evil.example")[0] == 403
    rollback = f"/api/rollback?version={running.robot.session.version}"
    assert ask(running, rollback, method="POST", cookie=cookie, Origin=origin)[0] == 409  # one version only


def test_without_a_session_a_connection_shows_nothing(running: CorrectionServer):
    origin = running.origins.origins[0]
    for path in ("/ws/control", "/ws/frames"):
        with connect(origin.replace("http", "ws") + path, additional_headers={"Origin": origin}) as socket:
            assert closing(socket)[0] == 4401


def test_connections_end_with_their_session_and_the_arm_holds(
    running: CorrectionServer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("real_robot.corrections.access.SESSION_LIFE_S", 3.0)
    origin, cookie = open_session(running.invite("Lea"))
    headers = {"Cookie": cookie, "Origin": origin}
    with (
        connect(origin.replace("http", "ws") + "/ws/frames", additional_headers=headers, max_size=2**22) as frames,
        open_control(origin, cookie) as socket,
    ):
        socket.send('{"type": "acquire"}')
        token = wait_for(socket, "lease")["token"]
        socket.send(json.dumps({"type": "do", "token": token, "what": "next"}))
        socket.send(json.dumps({"type": "do", "token": token, "what": "take_over"}))
        while wait_for(socket, "state")["mode"] != "human":
            pass
        assert closing(socket) == closing(frames) == (4401, "the session has ended")
    deadline = time.monotonic() + 30
    while running.robot.session.mode != "hold" or running.robot.lease.holder is not None:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("role", ["viewer", "labeller"])
def test_who_only_watches_cannot_move_or_roll_back(running: CorrectionServer, role):
    origin, cookie = open_session(running.invite("Vera", role))
    with open_control(origin, cookie) as socket:
        wait_for(socket, "state")
        for message in (
            {"type": "acquire"},
            {"type": "do", "token": 1, "what": "take_over"},
            {"type": "input", "token": 1, "deadman": True, "keys": ["KeyW"]},
        ):
            socket.send(json.dumps(message))
            assert wait_for(socket, "refused")["reason"] == f"a {role} may not move the robot"
    assert ask(running, "/api/rollback", method="POST", cookie=cookie, Origin=origin)[0] == 403
    assert ask(running, "/api/invite/operator", method="POST", cookie=cookie, Origin=origin)[0] == 403
    id = "0" * 26
    expected = {"viewer": 403, "labeller": 404}[role]
    if role == "viewer":
        assert ask(running, "/api/classifier/fit", method="POST", cookie=cookie, Origin=origin)[0] == 403
    for change in ("label/success", "success_from?step=1", "trim?first=0&end=1", "split?at=1"):
        path = f"/api/episodes/{id}/{change}"
        assert ask(running, path, method="POST", cookie=cookie, Origin=origin)[0] == expected


def test_people_who_are_invited_have_names_of_their_own(running: CorrectionServer):
    origin, cookie = open_session(running.invite("Anna"))

    def invited() -> str:
        status, body = ask(running, "/api/invite/labeller", method="POST", cookie=cookie, Origin=origin)
        assert status == 200
        _, own = open_session(json.loads(body)["address"])
        return str(json.loads(ask(running, "/api/me", cookie=own)[1])["name"])

    first, second = invited(), invited()
    assert first != second
    assert first.startswith("labeller ") and first.endswith(" invited by Anna")


def test_words_that_are_none_of_the_allowed_ones_are_refused(running: CorrectionServer):
    with EpisodeStore(running.folder / "episodes") as store:
        id = store.add(make_episode())
        origin, cookie = open_session(running.invite("Lars"))
        for wrong in (f"/api/episodes/{id}/label/good", "/api/invite/owner"):
            status, body = ask(running, wrong, method="POST", cookie=cookie, Origin=origin)
            assert (status, b"Input should be " in body) == (422, True)
        for wrong in ("outcome=good", "who=me"):
            assert ask(running, f"/api/episodes?{wrong}", cookie=cookie)[0] == 422
        assert ask(running, "/api/invite/owner", method="POST", Origin=origin)[0] == 401
        assert store.history(id) == []
        store.delete(id, author="the test")


def test_wrong_cuts_are_refused_with_a_reason(running: CorrectionServer):
    with EpisodeStore(running.folder / "episodes") as store:
        id = store.add(make_episode(steps=8, every=2))
        origin, cookie = open_session(running.invite("Lara", "labeller"))

        def cut(what: str) -> tuple[int, str]:
            status, body = ask(running, f"/api/episodes/{id}/{what}", method="POST", cookie=cookie, Origin=origin)
            return status, body.decode()

        assert cut("trim?first=1&end=8")[0] == 422
        status, reason = cut("split?at=8")
        assert (status, "cannot be cut at 0 and 8" in reason) == (422, True)
        assert store.history(id) == []
        assert json.loads(cut("split?at=4")[1])["id"] == f"{id}.4-8"
        assert cut("trim?first=0&end=2") == (404, "no such episode\n")  # only its parts are
        assert [change.author for change in store.history(id)] == ["Lara"]
        store.undo(id, author="the test")
        store.delete(id, author="the test")


def test_a_step_of_an_episode_that_was_cut_since_it_was_shown_is_refused(running: CorrectionServer):
    with EpisodeStore(running.folder / "episodes") as store:
        id = store.add(make_episode(steps=12))
        origin, cookie = open_session(running.invite("Ann", "labeller"))

        def change(what: str) -> tuple[int, str]:
            status, body = ask(running, f"/api/episodes/{id}/{what}", method="POST", cookie=cookie, Origin=origin)
            return status, body.decode()

        store.trim(id, 4, 12, author="Ben")
        for what in ("success_from?step=6", "trim?first=0&end=6", "split?at=6"):
            status, reason = change(f"{what}&shown=0-12")
            assert (status, "somebody has cut this episode meanwhile" in reason) == (409, True)
        assert store.labels(id) == {"trim": "4-12"}
        assert change("success_from?step=6&shown=4-12")[0] == 200
        assert change("trim?first=0&end=6&shown=4-12")[0] == 200
        assert store.labels(id) == {"trim": "4-10", "success_from": 10}
        store.delete(id, author="the test")


def test_of_two_clients_one_moves_the_robot_and_a_lost_one_leaves_it_holding(running: CorrectionServer):
    first, second = (open_control(*open_session(running.invite(name))) for name in ("Anna", "Ben"))
    robot = running.robot
    with second:
        with first:
            first.send('{"type": "acquire"}')
            token = wait_for(first, "lease")["token"]
            second.send('{"type": "acquire"}')
            assert wait_for(second, "refused")["reason"] == "another browser controls the robot"
            first.send(json.dumps({"type": "do", "token": token, "what": "take_over"}))
            drive = {"type": "input", "token": token, "deadman": True, "keys": ["KeyR"]}
            for stolen in (token, token + 1):
                second.send(json.dumps(drive | {"token": stolen}))
                assert "another browser" in wait_for(second, "refused")["reason"]
            while (state := wait_for(first, "state"))["mode"] != "human":
                pass
            taken_at = state["step"]
            first.send(json.dumps(drive))
            while wait_for(first, "state")["step"] == taken_at:
                pass
        # its connection is closed while it drives
        state = wait_for(second, "state")
        while state["mode"] != "hold" or state["step"] <= taken_at:  # also those from before it took over, on hold too
            state = wait_for(second, "state")
        assert (state["mode"], state["reason"], state["holder"]) == ("hold", "the connection ended", None)
        length = state["step"]
        time.sleep(0.5)
        assert robot.session.mode == "hold"
        assert robot.session.attempt.length <= length + 2
        second.send('{"type": "acquire"}')
        later = wait_for(second, "lease")["token"]
        assert later > token
        second.send(json.dumps({"type": "do", "token": later, "what": "abort"}))
        second.send(json.dumps({"type": "do", "token": later, "what": "next"}))
        number = state["episode"]
        while state["episode"] == number:
            state = wait_for(second, "state")
    events = [json.loads(line) for line in (running.folder / "audit.jsonl").read_text().splitlines()]
    moved = [(event["event"], event["person"]) for event in events if event["person"] in ("Anna", "Ben")]
    assert ("takes over", "Anna") in moved
    assert ("takes over", "Ben") not in moved
    assert ("hold", "Anna") in moved


def test_who_takes_over_while_another_lets_go_drives_an_intervention_of_their_own(tmp_path: Path):
    with server(tmp_path) as one:
        robot, session = one.robot, one.robot.session

        def drive(client: str, name: str) -> None:
            holder = robot.lease.acquire(client, name)
            assert holder is not None
            robot.command(lambda: session.take_over(person=name)).result(30)

            def drove() -> bool:
                robot.receive(client, holder.token, RawInput(deadman=True, keys=frozenset({"KeyW"})))
                attempt = session.attempt
                who = [attempt.operators[step.intervention] for step in attempt.steps if step.actor == HUMAN]
                return who.count(name) >= 3

            wait(drove, seconds=10)

        drive("A", "anna")
        release, released = robot.lease.release, threading.Event()

        def slow_release(client: str) -> Holder | None:
            """The lease is free, and the arm does not hold yet."""
            holder = release(client)
            released.set()
            time.sleep(0.5)
            return holder

        robot.lease.release = slow_release  # type: ignore[method-assign]
        letting_go = threading.Thread(target=robot.release, args=("A", "let go"))
        letting_go.start()
        released.wait(30)
        drive("B", "ben")
        letting_go.join()
        robot.command(lambda: None).result(30)
        assert (session.mode, session.attempt.operators) == ("human", ["anna", "ben"])


def test_damaged_and_oversize_frames_do_not_disturb_the_others(running: CorrectionServer):
    origin, cookie = open_session(running.invite("Mallory"))
    rng = random.Random(1)
    for _ in range(20):
        with open_control(origin, cookie) as socket, suppress(ConnectionClosed):  # after a binary frame
            for _ in range(50):
                damaged = rng.randbytes(rng.randint(0, 300))
                socket.send(damaged if rng.random() < 0.1 else damaged.decode("latin-1"))
                if rng.random() < 0.1:
                    break
    with open_control(origin, cookie) as socket:
        socket.send(b"{}")
        assert closing(socket) == (1003, "messages are text")
    with open_control(origin, cookie) as socket:
        socket.send("x" * 100_000)
        assert closing(socket)[0] == 1009
    with open_control(origin, cookie) as socket:
        with suppress(ConnectionClosed):
            for _ in range(400):
                socket.send('{"type": "release"}')
        assert closing(socket)[1] == "more than 200 messages per second"
    assert running.robot.failure is None
    assert ask(running, "/api/me", cookie=cookie)[0] == 200


@pytest.mark.parametrize(
    "path",
    [
        "/assets/../access.py",
        "/assets/%2e%2e/access.py",
        "/assets/..%2f..%2faccess.py",
        "/api/episodes/..%2f..%2faudit",
        "/api/episodes/ep-x/frames/..%2fwrist/0",
        "/api/episodes/00000000000000000000000000/frames/agent/0",
    ],
)
def test_names_do_not_lead_out_of_the_folder(running: CorrectionServer, path):
    _, cookie = open_session(running.invite())
    status, body = ask(running, path, cookie=cookie)
    assert status == 404
    assert b"import" not in body


def test_an_episode_may_end_while_the_operator_decides_to_take_over(tmp_path: Path):
    with server(tmp_path, sim=replace(SIM, max_steps=4), pace=1000.0) as one:

        def decide(state: dict) -> bool:
            while one.robot.session.mode == "policy":
                time.sleep(0.005)
            return True

        with ScriptedOperator(one.invite("script"), decide) as operator:
            done = operator.correct(2)
    assert [(episode["corrected"], episode["success"]) for episode in done] == [(False, False)] * 2


def test_who_waits_for_a_slow_command_of_their_own_keeps_control(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An arm comes to rest before an episode begins, and some simulators take seconds for it."""
    with server(tmp_path, lost_person_s=1.5, stale_input_s=1.0) as running:
        env, (origin, cookie) = running.robot.session.env, open_session(running.invite("Anna"))
        reset = env.reset

        def slow_reset(*env_ids: Sequence[int], start: Sequence[StartState]) -> None:
            time.sleep(2.0)
            reset(*env_ids, start=start)

        monkeypatch.setattr(env, "reset", slow_reset)
        with open_control(origin, cookie) as socket:
            socket.send(json.dumps({"type": "acquire"}))
            token = wait_for(socket, "lease")["token"]
            socket.send(json.dumps({"type": "do", "token": token, "what": "next"}))
            while (shown := wait_for(socket, "state"))["episode"] == 1:
                pass
            assert shown["you_hold"]


def test_a_command_that_fails_is_said_and_its_connection_lasts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    with server(tmp_path) as one, open_control(*open_session(one.invite())) as socket:
        socket.send('{"type": "acquire"}')
        do = {"type": "do", "token": wait_for(socket, "lease")["token"], "what": "next"}

        def fail(*, start: Sequence[StartState]) -> None:
            raise RuntimeError("stack overflow")

        with monkeypatch.context() as broken:
            broken.setattr(one.robot.session.env, "reset", fail)
            socket.send(json.dumps(do))
            assert wait_for(socket, "refused")["reason"] == "the command failed: RuntimeError: stack overflow"
        assert "in fail\n" in capfd.readouterr().err  # its traceback
        number = one.robot.session.number
        socket.send(json.dumps(do))
        while wait_for(socket, "state")["episode"] == number:
            pass


def test_a_scripted_operator_corrects_a_policy_that_fails(tmp_path: Path):
    with server(tmp_path, show_expert=True, wait_for_input=True, pace=20.0) as one:
        with ScriptedOperator(one.invite("script"), TakeOverAfter(steps=6)) as operator:
            done = operator.correct(2)
        assert [(episode["corrected"], episode["success"]) for episode in done] == [(True, True)] * 2
        assert one.robot.failure is None
    with EpisodeStore(tmp_path / "out" / "episodes") as store:
        episodes = [store.read(entry.id) for entry in store.select()]
        assert [episode.id for episode in episodes][:2] == [episode["episode"] for episode in done]
    for episode in episodes[:2]:
        assert set(episode.actor[:6]) == {POLICY}
        assert episode.actor[-1] == HUMAN
        assert episode.operators == ("script",)
        assert episode.succeeded


def test_a_full_disk_is_said_and_the_episode_can_be_stored_later(tmp_path: Path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with server(tmp_path) as one, open_control(*open_session(one.invite("Anna"))) as socket:
        while wait_for(socket, "state")["step"] < 10:
            pass
        socket.send('{"type": "acquire"}')
        label = json.dumps({"type": "do", "token": wait_for(socket, "lease")["token"], "what": "failure"})
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))
        try:
            socket.send(label)
            assert "no space left for episode" in wait_for(socket, "refused")["reason"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        socket.send(label)
        while (shown := wait_for(socket, "state"))["mode"] != "ended":
            pass
        assert one.robot.session.store.read(shown["stored_as"]).num_steps == shown["step"] >= 10


def test_a_copy_of_the_bundle_that_a_full_disk_cut_off_is_made_again(tmp_path: Path):
    write_bundle(tmp_path / "given")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4_000, hard))
    try:
        with pytest.raises(OSError, match="File too large"), server(tmp_path):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    with server(tmp_path):
        assert read_bundle_info(tmp_path / "out" / "bundle") == read_bundle_info(tmp_path / "given")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_is_under_way_when_the_program_is_terminated_is_stored(tmp_path: Path, number: signal.Signals):
    given, sim, out = write_bundle(tmp_path / "given"), tmp_path / "sim.yaml", tmp_path / "out"
    settings = "name: tabletop, tasks: [reach], num_envs: 1, image_size: [32, 32], threads: 1, max_steps: 4000"
    sim.write_text(f"sim: {{{settings}}}\n")
    arguments = ["correct", given, "--sim", sim, "--out", out, "--no-browser"]
    heard = "import signal; signal.signal(signal.SIGHUP, signal.SIG_DFL)"  # it is ignored below nohup
    command = [sys.executable, "-c", f"{heard}; from vla_rl.cli.main import main; main()", *map(str, arguments)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "token=" in process.stderr.readline()
        time.sleep(2.0)  # 40 control steps
        process.send_signal(number)
        _, said = process.communicate(timeout=60)
    assert (process.returncode, said.splitlines()[-1]) == (143, "vla-rl: terminated")
    with EpisodeStore(out / "episodes") as store:
        assert [labels for _, labels in store.labelled()] == [{"outcome": "abort"}]


def test_a_damaged_episode_is_listed_and_the_others_can_be_read(tmp_path: Path):
    with server(tmp_path) as one, EpisodeStore(tmp_path / "out" / "episodes") as store:
        ids = [store.add(make_episode()) for _ in range(2)]
        file = store.file(ids[0])
        os.truncate(file, file.stat().st_size // 2)
        _, cookie = open_session(one.invite())
        status, body = ask(one, "/api/episodes", cookie=cookie)
        assert status == 200
        rows = json.loads(body)["episodes"]
        assert [(row["id"], row["damaged"]) for row in rows] == [(ids[1], False), (ids[0], True)]
        assert ask(one, "/api/training", cookie=cookie)[0] == 200
        assert ask(one, f"/api/episodes/{ids[1]}", cookie=cookie)[0] == 200
        status, body = ask(one, f"/api/episodes/{ids[0]}", cookie=cookie)
        assert status == 422 and b"vla-rl data verify" in body


def test_a_copy_of_a_classifier_under_another_name_is_no_fit(tmp_path: Path):
    for name in ("fit-002", "fit-002-good"):
        (tmp_path / "classifiers" / name).mkdir(parents=True)
    fits = ClassifierFits(tmp_path, lambda fit: [sys.executable, "-c", f"print({str(fit)!r})"])
    assert fits.read() == {"state": "failed", "fit": "fit-002", "log": ""}
    fits.start()
    assert fits.read()["fit"] == "fit-003"
    fits.close()


def test_a_second_server_of_a_folder_is_refused(tmp_path: Path):
    with server(tmp_path), pytest.raises(UserError, match="is being written by another process"), server(tmp_path):
        pass


def test_a_server_that_is_started_again_serves_the_version_that_was_rolled_back_to(tmp_path: Path):
    def published() -> str:
        return bundle_version(tmp_path / "out" / "bundle")

    def rollback(version: str) -> str:
        return f"/api/rollback?version={version[:12]}"

    with server(tmp_path) as one:
        versions = one.robot.session.versions
        good = versions.current.hello.fingerprint
        write_bundle(tmp_path / "out" / "bundle", seed=1)
        worse, deadline = published(), time.monotonic() + 60
        while versions.current.hello.fingerprint != worse:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        origin, cookie = open_session(one.invite())
        for status in (200, 409):  # two clicks roll one version back
            status_now, body = ask(one, rollback(worse), method="POST", cookie=cookie, Origin=origin)
            assert status_now == status
        assert f"version {worse[:8]} is not the newest any more: {good[:8]} is".encode() in body
        assert published() == good  # what the next round of learning starts from
    with server(tmp_path) as again:
        assert again.robot.session.attempt.policy_version == good
        assert worse in again.robot.session.versions.rolled_back  # not taken up again
    write_bundle(tmp_path / "out" / "bundle", seed=1)
    with server(tmp_path) as again:
        assert again.robot.session.attempt.policy_version == published() == good
    write_bundle(tmp_path / "out" / "bundle", seed=2)
    for newest in (published(), good):
        with server(tmp_path) as again:
            assert again.robot.session.attempt.policy_version == newest
            origin, cookie = open_session(again.invite())
            rolled_back = ask(again, rollback(newest), method="POST", cookie=cookie, Origin=origin)[0]
            assert rolled_back == (409 if newest == good else 200)  # at once, where there is one before it


def publish_residual(folder: Path) -> str:
    """Its name; with chunks of one action."""
    policy = residual_on(load_bundle(folder / "given"), ResidualConfig(scale=0.3, action_horizon=1))
    save_bundle(policy, folder / "out" / "bundle")
    return bundle_version(folder / "out" / "bundle")


def test_a_version_that_control_execute_steps_does_not_fit_is_not_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    said = ""
    with server(tmp_path, execute_steps=4) as one:
        first, deadline = one.robot.session.versions.kept, time.monotonic() + 60
        publish_residual(tmp_path)
        while "control.execute_steps is 4" not in said:
            assert time.monotonic() < deadline
            time.sleep(0.05)
            said += capsys.readouterr().err
        assert one.robot.session.versions.kept == first
    assert "the new bundle is not served: " in said


def test_a_version_with_chunks_of_another_length_is_served_and_can_be_rolled_back(tmp_path: Path):
    """As the recipe residual publishes them."""

    with server(tmp_path, execute_steps=None) as one:
        versions = one.robot.session.versions
        first = versions.current.hello
        newest, deadline = publish_residual(tmp_path), time.monotonic() + 30
        while versions.current.hello.fingerprint == first.fingerprint:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        other = {"action_horizon": 1, "methods": list(UNGUIDED), "remembers_decisions": True}
        assert versions.current.hello == replace(first, fingerprint=newest, **other)
        session = one.robot.session
        one.robot.command(lambda: session.next_episode(person="anna", drive=True)).result(30)
        while session.attempt.length < 3:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert session.attempt.policy_version == newest
    with server(tmp_path, execute_steps=None) as again:
        versions = again.robot.session.versions
        assert versions.kept == [first.fingerprint, newest]
        assert versions.report_fault(newest, "by anna")
        assert versions.current.hello == first


def test_every_change_of_an_episodes_labels_changes_what_the_rule_counts(tmp_path: Path):
    with server(tmp_path, sim=replace(SIM, max_steps=12)) as one:
        session = one.robot.session
        deadline = time.monotonic() + 60
        while session.mode != "ended":  # until the time is up: a failure, which nobody has labelled
            assert time.monotonic() < deadline
            time.sleep(0.05)
        id = session.last_episode
        origin, cookie = open_session(one.invite("Lara", "labeller"))

        def counted(change: str, part: str = "") -> tuple:
            path = f"/api/episodes/{id}{part}/{change}"
            assert ask(one, path, method="POST", cookie=cookie, Origin=origin)[0] == 200
            return tuple(session.versions.summary()[0][key] for key in ("episodes", "success"))

        assert counted("label/success") == (1, 1.0)
        assert counted("undo") == (1, 0.0)  # as the environment said
        assert counted("success_from?step=4") == (1, 1.0)
        assert counted("undo") == (1, 0.0)  # as the environment said
        assert (
            ask(one, f"/api/episodes/{id}/success_from?step=13", method="POST", cookie=cookie, Origin=origin)[0] == 422
        )
        assert counted("label/failure") == (1, 0.0)
        assert counted("success_from?step=4") == (1, 1.0)
        assert counted("undo") == (1, 0.0)  # as the person said before
        assert counted("label/success") == (1, 1.0)
        assert counted("delete") == (0, None)
        assert counted("undo") == (1, 1.0)
        assert counted("label/abort") == (0, None)
        assert counted("undo") == (1, 1.0)  # the label is there again
        assert counted("undo") == (1, 0.0)
        assert counted("split?at=4") == (1, 0.0)
        assert counted("label/success", ".0-4") == (1, 0.0)  # of the whole
        assert counted("delete", ".0-4") == (1, 0.0)
        assert counted("delete", ".4-12") == (0, None)  # nothing of it is left
        assert counted("undo", ".4-12") == (1, 0.0)


def test_a_persons_label_that_is_undone_leaves_an_episode_that_does_not_count(tmp_path: Path):
    with server(tmp_path) as one:
        session = one.robot.session
        deadline = time.monotonic() + 60
        while session.attempt.length < 4:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        one.robot.command(lambda: session.end("failure", person="Anna")).result(30)
        assert session.versions.summary()[0]["episodes"] == 1
        origin, cookie = open_session(one.invite("Lara", "labeller"))
        path = f"/api/episodes/{session.last_episode}/undo"
        assert ask(one, path, method="POST", cookie=cookie, Origin=origin)[0] == 200
        assert session.versions.summary()[0]["episodes"] == 0


def test_the_attempt_of_a_robot_that_fails_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with server(tmp_path) as one:
        session = one.robot.session
        wait(lambda: session.attempt.length > 3)

        def fail(raw: RawInput | None) -> bool:
            raise RuntimeError("the arm is gone")

        monkeypatch.setattr(session, "tick", fail)
        wait(lambda: one.robot.failure is not None)
    with EpisodeStore(one.folder / "episodes") as store:
        (entry,) = store.entries()
        assert len(store.read(entry.id).action) == session.attempt.length > 3


@pytest.mark.parametrize("fails", [True, False])
def test_what_is_asked_of_a_failed_robot_is_refused_and_a_connection_that_ended_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
):
    with server(tmp_path, pace=1.0) as one:
        robot, stepping, goes_on = one.robot, threading.Event(), threading.Event()
        tick = robot.session.tick

        def blocked(raw: RawInput | None) -> bool:
            stepping.set()
            assert goes_on.wait(60)
            if fails:
                raise RuntimeError("the arm is gone")
            return tick(raw)

        monkeypatch.setattr(robot.session, "tick", blocked)
        assert stepping.wait(60)
        queued, left = robot.command(lambda: 1), robot.command(lambda: 2)
        assert left.cancel()  # as of a connection that ends
        goes_on.set()
        if not fails:
            assert queued.result(timeout=20) == 1
            assert robot.command(lambda: 3).result(timeout=20) == 3
            assert robot.failure is None
            return
        reason = "the server failed: RuntimeError: the arm is gone"
        with pytest.raises(Refused, match=reason):
            queued.result(timeout=20)
        origin, cookie = open_session(one.invite("Anna"))
        with open_control(origin, cookie) as socket:
            socket.send(json.dumps({"type": "acquire"}))
            message = {"type": "state"}
            while message["type"] == "state":
                message = json.loads(socket.recv(timeout=20))
        assert message == {"type": "refused", "reason": reason}
