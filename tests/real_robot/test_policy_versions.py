"""Hot swap and roll-back: real bundles on disk, a real server and client."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosedError
from websockets.sync.client import ClientConnection, connect

from episodes.overlays import EpisodeOutcome
from policies.bundle import bundle_version, read_bundle_info, save_bundle
from real_robot.serving.backends import ChunkBackend
from real_robot.serving.client import PolicyClient
from real_robot.serving.commands import default_token_file
from real_robot.serving.protocol import ActRequest, Chunk, EpisodeEnd, pack, unpack
from real_robot.serving.published import PublishedVersions
from real_robot.serving.registry import load_backend
from real_robot.serving.server import PolicyServer, ServerConfig
from real_robot.serving.versions import BundleWatcher, RollbackRule, Versions, follow
from sims.errors import UserError
from tests.real_robot.small_policies import change_settings, other_robot, small_policy
from tests.real_robot.test_control_thread import wait

TOKEN = "0123456789abcdef"
POLL_S = 0.1


def ended(fingerprint: str, outcome: EpisodeOutcome, *, intervened: int = 0) -> EpisodeEnd:
    return EpisodeEnd(fingerprint=fingerprint, outcome=outcome, intervened=intervened)


def write(path: Path, seed: int, action_dim: int = 4) -> str:
    """An untrained bundle; its fingerprint."""
    save_bundle(small_policy(seed=seed, robot=other_robot(action_dim=action_dim)), path)
    return bundle_version(path)


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    write(path, 1)
    return path


@pytest.fixture(autouse=True)
def frequent_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("real_robot.serving.versions.POLL_S", POLL_S)


def version(versions: Versions) -> str:
    return versions.current.hello.fingerprint


def test_a_worse_version_is_rolled_back_and_not_offered_again(bundle: Path) -> None:
    versions = Versions(load_backend(bundle), rule=RollbackRule(episodes=4, success_drop=0.3))
    first = version(versions)
    outcomes: tuple[EpisodeOutcome, ...] = ("success", "success", "failure", "success")
    for outcome in outcomes:
        assert versions.report(ended(first, outcome)) == ""
    second = write(bundle, 2)
    versions.offer(load_backend(bundle))
    assert version(versions) == second
    assert [versions.report(ended(second, "failure")) for _ in range(3)] == ["", "", ""]
    assert versions.report(ended(second, "unknown")) == ""
    assert versions.report(ended(first, "success")) == ""  # a slow robot's last episode counts for the version it ran
    news = versions.report(ended(second, "failure"))
    assert news.endswith("success fell from 80% to 0% in 4 episodes")
    assert version(versions) == first
    with pytest.raises(ValueError, match="was rolled back before"):
        versions.offer(load_backend(bundle))


def test_a_bundle_with_weights_that_are_not_numbers_is_not_served(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    versions = Versions(load_backend(bundle))
    first, tries = version(versions), []

    def load(path: Path) -> ChunkBackend:
        tries.append(path)
        return load_backend(path)

    policy = small_policy(seed=2, robot=other_robot(action_dim=4))
    for parameter in policy.parameters():
        parameter.data.fill_(1e17)  # finite, but nothing computed from it is
    save_bundle(policy, bundle)
    with pytest.raises(ValueError, match="gives actions that are not finite"):
        load_backend(bundle)
    with closing(BundleWatcher(versions, bundle, load)):
        wait(lambda: bool(tries))
    said = capsys.readouterr().err
    assert said.startswith("the new bundle is not served: ")
    assert "gives actions that are not finite" in said
    assert version(versions) == first != bundle_version(bundle)


def test_a_bundle_whose_export_comes_later_is_served_then(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    versions = Versions(load_backend(bundle))
    first, tries = version(versions), []

    def load(path: Path) -> ChunkBackend:
        tries.append(time.monotonic())
        if not (path / "policy.onnx").exists():
            raise UserError("Run: vla-rl export BUNDLE --to onnx")
        return load_backend(path)

    second = write(bundle, 2)
    with closing(BundleWatcher(versions, bundle, load)):
        wait(lambda: len(tries) >= 4)
        assert version(versions) == first
        (bundle / "policy.onnx").touch()
        wait(lambda: version(versions) == second)
    assert len(capsys.readouterr().err.splitlines()) == 2
    pauses = [after - before for before, after in pairwise(tries[:4])]
    assert all(pause >= POLL_S * 2**number for number, pause in enumerate(pauses))


def test_a_version_that_fails_while_it_serves_is_rolled_back_at_once(bundle: Path) -> None:
    versions = Versions(load_backend(bundle))
    first, second = version(versions), write(bundle, 2)
    versions.offer(load_backend(bundle))
    assert version(versions) == second
    assert versions.report_fault(second, "not finite").endswith(f"to {first[:12]}: not finite")
    assert version(versions) == first
    assert list(versions.rolled_back) == [second]


def test_the_only_version_serves_on_after_a_fault_until_another_comes_and_never_again(bundle: Path) -> None:
    dropped: list[tuple[str, str]] = []
    versions = Versions(load_backend(bundle), record=lambda *pair: dropped.append(pair))
    first = version(versions)
    said = versions.report_fault(first, "not finite")
    assert said == f"version {first[:12]} failed and serves until there is another one: not finite"
    assert versions.report_fault(first, "not finite") == ""  # said once
    assert (version(versions), dropped) == (first, [])
    second = write(bundle, 2)
    versions.offer(load_backend(bundle))
    assert (versions.kept, dropped) == ([second], [(first, second)])
    versions.report_fault(second, "not finite")
    assert version(versions) == second  # not the first one again
    write(bundle, 1)
    with pytest.raises(ValueError, match="was rolled back before: not finite"):
        versions.offer(load_backend(bundle))


def test_a_version_that_a_fleet_rolls_back_while_it_does_not_serve_is_not_gone_back_to(bundle: Path) -> None:
    versions = Versions(load_backend(bundle))
    names = [version(versions)]
    for seed in (2, 3):
        names.append(write(bundle, seed))
        versions.offer(load_backend(bundle))
    assert versions.report_fault("another", "for the whole fleet") == ""
    assert versions.report_fault(names[1], "for the whole fleet")
    assert version(versions) == names[2]
    versions.report_fault(names[2], "by hand")
    assert version(versions) == names[0]


def test_a_version_is_compared_with_the_newest_earlier_one_of_which_enough_is_known(bundle: Path) -> None:
    versions = Versions(load_backend(bundle), rule=RollbackRule(episodes=3))
    names = [version(versions)]

    def offer(seed: int) -> None:
        names.append(write(bundle, seed))
        versions.offer(load_backend(bundle))

    def report(number: int, outcome: EpisodeOutcome, times: int) -> str:
        return "".join(versions.report(ended(names[number], outcome)) for _ in range(times))

    report(0, "success", 3)
    for seed in (2, 3, 4):  # too fast for the rule
        offer(seed)
        report(seed - 1, "success", 2 if seed < 4 else 0)
    assert versions.kept == [names[0], *names[2:]]  # the one that is compared with stays
    assert f"to {names[0][:12]}: success fell from 100% to 0% in 3" in report(3, "failure", 3)
    assert versions.kept == [names[2], names[0]]  # the one between is unproven and does not serve
    offer(3)
    report(2, "success", 1)
    offer(5)
    assert f"to {names[2][:12]}: " in report(5, "failure", 3)


def test_an_older_bundle_that_is_put_back_serves_again_unless_it_was_rolled_back(
    bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    versions, watcher = follow(bundle, load_backend, restore=False)
    first = version(versions)
    versions.report(ended(first, "success"))
    second = write(bundle, 2)
    wait_for(lambda: version(versions) == second)
    write(bundle, 1)
    wait_for(lambda: version(versions) == first)
    assert [(one["version"], one["episodes"]) for one in versions.summary()] == [(second[:12], 0), (first[:12], 1)]
    versions.report_fault(second, "by hand")
    capsys.readouterr()
    tries, checked = [], versions.check

    def check(fingerprint: str) -> None:
        tries.append(fingerprint)
        checked(fingerprint)

    monkeypatch.setattr(versions, "check", check)
    write(bundle, 2)
    wait_for(lambda: len(tries) >= 3)
    watcher.close()
    said = f"the new bundle is not served: version {second[:12]} was rolled back before: by hand"
    assert capsys.readouterr().err.splitlines() == [said]
    assert version(versions) == first
    again, watcher = follow(bundle, load_backend, restore=False)
    watcher.close()
    assert version(again) == first


def test_more_interventions_roll_back_and_an_equal_version_stays(bundle: Path) -> None:
    versions = Versions(load_backend(bundle), rule=RollbackRule(episodes=2))
    first = version(versions)
    second = write(bundle, 2)
    for fingerprint in (first, first):
        versions.report(ended(fingerprint, "success"))
    versions.offer(load_backend(bundle))
    assert [versions.report(ended(second, "success")) for _ in range(10)] == [""] * 10
    helped = ended(second, "success", intervened=1)
    said = [versions.report(helped) for _ in range(5)]
    assert any("interventions rose from 0%" in news for news in said)
    assert version(versions) == first


def test_three_versions_are_kept_and_one_for_another_robot_is_refused(bundle: Path) -> None:
    versions = Versions(load_backend(bundle))
    seen = [version(versions)]
    for seed in (2, 3, 4):
        seen.append(write(bundle, seed))
        versions.offer(load_backend(bundle))
    assert versions.kept == seen[1:]
    write(bundle, 5, action_dim=3)
    with pytest.raises(ValueError, match="for another robot"):
        versions.offer(load_backend(bundle))
    assert version(versions) == seen[-1]


@contextmanager
def served(versions: Versions, port: int = 0) -> Iterator[int]:
    """A server in a thread; its port."""
    ready, stop, ports = threading.Event(), threading.Event(), []

    async def main() -> None:
        async with PolicyServer(versions, ServerConfig(port=port, token=TOKEN)) as running:
            ports.append(running.port)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    yield ports[0]
    stop.set()
    thread.join()


@pytest.fixture
def serving(bundle: Path) -> Iterator[tuple[Path, PolicyClient]]:
    """A server that follows the bundle, and a client of it."""
    versions = Versions(load_backend(bundle))
    follower = BundleWatcher(versions, bundle, load_backend)
    with served(versions) as port:
        client = PolicyClient(f"ws://127.0.0.1:{port}", token=TOKEN, timeout_s=30.0)
        yield bundle, client
        client.close()
        follower.close()


def test_an_episode_that_ends_without_a_server_is_counted_for_its_version_when_there_is_one(bundle: Path) -> None:
    versions = Versions(load_backend(bundle))
    with served(versions) as port:
        client = PolicyClient(f"ws://127.0.0.1:{port}", token=TOKEN, timeout_s=30.0, retry_s=0.05)
        first = settled(client)
        client.bind(first)
    try:
        wait_for(lambda: client.hello is None)
        client.end_episode("success")
        wait_for(lambda: "refused" in client.problem)  # it has tried again
        second = write(bundle, 2)
        versions.offer(load_backend(bundle))
        with served(versions, port):
            assert settled(client) == second
            counts = {one["version"]: one["episodes"] for one in versions.summary()}
            assert counts == {first[:12]: 1, second[:12]: 0}
    finally:
        client.close()


def test_the_end_of_an_episode_is_sent_before_the_connection_is_closed(bundle: Path) -> None:
    versions = Versions(load_backend(bundle))
    with served(versions) as port:
        for _ in range(5):
            client = PolicyClient(f"ws://127.0.0.1:{port}", token=TOKEN, timeout_s=30.0)
            client.bind(settled(client))
            client.end_episode("failure")
            client.close()
        wait_for(lambda: versions.summary()[0]["episodes"] == 5, 10.0)


ACT = ActRequest(
    id=1, images={"agent": np.zeros((32, 32, 3), np.uint8)}, state=np.zeros(5, np.float32), instruction="x",
    method="replace", leftover=np.zeros((0, 4), np.float32), delay=0, execute_steps=4,
)  # fmt: skip


def replaced(bundle: Path) -> tuple[Versions, str, str]:
    """A version and the one that is served in its place."""
    versions = Versions(load_backend(bundle))
    first, second = version(versions), write(bundle, 2)
    versions.offer(load_backend(bundle))
    return versions, first, second


def test_a_robot_that_waits_while_its_version_is_rolled_back_begins_with_the_one_before(bundle: Path) -> None:
    versions, first, second = replaced(bundle)
    with served(versions) as port:
        client = PolicyClient(f"ws://127.0.0.1:{port}", token=TOKEN, timeout_s=30.0)
        assert settled(client) == second
        versions.report_fault(second, "by hand")
        wait_for(lambda: client.hello is not None and client.hello.fingerprint == first, 20.0)
        client.close()


def ask_in_vain(connection: ClientConnection) -> None:
    """Until the connection is closed."""
    connection.send(pack(ACT))
    while True:
        assert "was rolled back" in unpack(connection.recv()).reason


def test_an_episode_under_way_keeps_the_version_that_is_rolled_back_and_no_other_begins_with_it(bundle: Path) -> None:
    versions, _, second = replaced(bundle)
    with served(versions) as port:
        url, header = f"ws://127.0.0.1:{port}", {"Authorization": f"Bearer {TOKEN}"}
        with connect(url, additional_headers=header) as under_way, connect(url, additional_headers=header) as waiting:
            for connection in (under_way, waiting):
                assert unpack(connection.recv()).fingerprint == second
            for _ in range(2):
                under_way.send(pack(ACT))
                assert isinstance(unpack(under_way.recv()), Chunk)
                versions.report_fault(second, "by hand")
            with pytest.raises(ConnectionClosedError, match="rolled back"):
                ask_in_vain(waiting)


def settled(client: PolicyClient) -> str:
    wait_for(lambda: client.hello is not None)
    assert client.hello is not None
    return client.hello.fingerprint


def wait_for(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_new_bundle_serves_from_the_next_episode_on_and_a_damaged_one_does_not(
    serving: tuple[Path, PolicyClient], capsys: pytest.CaptureFixture[str]
) -> None:
    bundle, client = serving
    first = settled(client)
    second = write(bundle, 2)
    output = ""

    def printed(text: str) -> bool:
        nonlocal output
        output += capsys.readouterr().err
        return text in output

    wait_for(lambda: printed("from the next episode on"))
    assert settled(client) == first
    client.end_episode("success")
    assert settled(client) == second
    client.ask(ACT)
    answers = []
    wait_for(lambda: bool(answers.append(client.poll()) or answers[-1]))
    assert answers[-1].chunk is not None
    write(bundle.parent / "third", 3)
    weights = bundle.parent / "third" / read_bundle_info(bundle.parent / "third").tensors
    (bundle / weights.name).write_bytes(weights.read_bytes()[:-7] + b"damaged")
    (bundle.parent / "third" / "bundle.json").rename(bundle / "bundle.json")
    wait_for(lambda: printed("the new bundle is not served"))
    client.end_episode("success")
    assert settled(client) == second


def test_a_server_that_is_started_again_does_not_serve_what_was_rolled_back(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    versions, watcher = follow(bundle, load_backend, restore=False)
    first, second = version(versions), write(bundle, 2)
    wait_for(lambda: version(versions) == second)
    assert versions.report_fault(second, "by hand")
    watcher.close()
    again, watcher = follow(bundle, load_backend, restore=False)
    watcher.close()
    assert version(again) == first
    assert second in again.rolled_back
    assert f"version {second[:12]}, which was rolled back: serving {first[:12]}" in capsys.readouterr().err
    assert bundle_version(bundle) == second  # the run's own folder is only read
    third = write(bundle, 3)
    newest, watcher = follow(bundle, load_backend, restore=False)
    watcher.close()
    assert version(newest) == third
    assert newest.report_fault(third, "by hand").endswith(f"to {first[:12]}: by hand")
    other = write(bundle, 4, action_dim=3)
    moved, watcher = follow(bundle, load_backend, restore=False)
    watcher.close()
    assert version(moved) == other
    assert f"no roll-back to version {first[:12]}" in capsys.readouterr().err


@pytest.mark.parametrize("restore", [False, True])
def test_settings_that_are_changed_in_the_bundle_serve_from_the_next_episode_on(
    bundle: Path, restore: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    loads: list[int] = []

    def load(path: Path) -> ChunkBackend:
        loads.append(1)
        return load_backend(path)

    versions, watcher = follow(bundle, load, restore=restore)
    with closing(watcher):
        names = [version(versions)]
        versions.report(ended(names[0], "success"))
        for steps in (1, 2):
            time.sleep(2 * POLL_S)
            assert (version(versions), len(loads)) == (names[-1], steps)  # what is there already is not loaded again
            change_settings(bundle, steps)
            wait_for(lambda: version(versions) != names[-1], 10.0)
            names.append(bundle_version(bundle))
        assert versions.kept == names
        # what other settings achieved says nothing about these
        assert [one["episodes"] for one in versions.summary()] == [1, 0, 0]
    said = [f"serving version {name[:12]} from the next episode on" for name in names[1:]]
    assert capsys.readouterr().err.splitlines() == said


@pytest.mark.parametrize("restore", [False, True])
def test_settings_that_are_changed_in_the_bundle_are_those_of_the_next_start(bundle: Path, restore: bool) -> None:
    first, watcher = follow(bundle, load_backend, restore=restore)
    watcher.close()
    change_settings(bundle, 1)
    again, watcher = follow(bundle, load_backend, restore=restore)
    watcher.close()
    assert version(again) == bundle_version(bundle) != version(first)
    kept = PublishedVersions(bundle, restore=restore).folder(version(again))
    assert read_bundle_info(kept).config == read_bundle_info(bundle).config


def test_a_file_that_is_being_written_beside_the_bundle_is_no_problem(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As by an export: it has its own name when it is looked at."""
    (bundle / ".policy.onnx.1.partial").symlink_to(bundle / "gone")
    versions = Versions(load_backend(bundle))
    with closing(BundleWatcher(versions, bundle, load_backend)):
        second = write(bundle, 2)
        wait_for(lambda: version(versions) == second)
    assert capsys.readouterr().err == f"serving version {second[:12]} from the next episode on\n"


@pytest.mark.parametrize("restore", [False, True])
def test_a_version_that_failed_for_its_settings_serves_once_they_are_corrected(bundle: Path, restore: bool) -> None:
    """The weights are the same."""
    versions, watcher = follow(bundle, load_backend, restore=restore)
    with closing(watcher):
        good, settings = version(versions), read_bundle_info(bundle)
        change_settings(bundle, 1)
        bad = bundle_version(bundle)
        wait_for(lambda: version(versions) == bad)
        assert versions.report_fault(bad, "by hand").endswith(f"to {good[:12]}: by hand")
        assert (read_bundle_info(bundle) == settings) == restore
        versions.report(ended(bad, "failure"))  # it began before
        assert [one["episodes"] for one in versions.summary()] == [0]
        change_settings(bundle, 2)
        wait_for(lambda: version(versions) == bundle_version(bundle))
        assert versions.kept == [good, bundle_version(bundle)]
    again, watcher = follow(bundle, load_backend, restore=restore)
    watcher.close()
    assert (version(again), list(again.rolled_back)) == (bundle_version(bundle), [bad])


def test_a_server_that_can_write_nothing_beside_the_bundle_says_so_and_serves(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (bundle.parent / "published").write_text("")
    versions, watcher = follow(bundle, load_backend, restore=False)
    watcher.close()
    assert version(versions) == bundle_version(bundle)
    assert "a restart forgets roll-backs" in capsys.readouterr().err


@pytest.mark.parametrize("restore", [False, True])
@pytest.mark.parametrize(
    "record", ["", "[]", '{"format": 2, "order": 1, "rolled_back": []}', '{"order": ["ab"], "rolled_back": []}']
)
def test_a_damaged_record_of_versions_is_named_with_what_to_do(bundle: Path, restore: bool, record: str) -> None:
    """The last one is of a vla-rl that named versions by their weights."""
    index = bundle.parent / "published" / "versions.json"
    index.parent.mkdir()
    index.write_text(record)
    said = f"{index} is damaged, or of another version of vla-rl: remove it; then no roll-back before is known"
    with pytest.raises(UserError, match=f"^{re.escape(said)}$"):
        follow(bundle, load_backend, restore=restore)
    index.unlink()
    versions, watcher = follow(bundle, load_backend, restore=restore)
    watcher.close()
    assert version(versions) == bundle_version(bundle)


@pytest.mark.parametrize("restore", [False, True])
def test_a_roll_back_that_cannot_be_written_is_said_once_and_written_when_it_can_be(
    bundle: Path, restore: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    versions, watcher = follow(bundle, load_backend, restore=restore)
    with closing(watcher):
        first, second = version(versions), write(bundle, 2)
        wait_for(lambda: version(versions) == second)
        lock = bundle.parent / "published" / "versions.lock"
        lock.unlink()
        lock.mkdir()  # nothing can be opened there
        capsys.readouterr()
        assert versions.report_fault(second, "by hand").endswith(f"to {first[:12]}: by hand")
        assert version(versions) == first
        time.sleep(3 * POLL_S)
        (said,) = capsys.readouterr().err.splitlines()
        what = f"that {second[:12]} was rolled back"
        assert said.startswith(f"a restart forgets {what}, until it can be written: {lock}: ")
        lock.rmdir()
        wait_for(lambda: second in PublishedVersions(bundle, restore=restore).rolled_back, 10.0)
        wait_for(lambda: (bundle_version(bundle) == first) == restore, 10.0)
    assert capsys.readouterr().err == f"it is written now {what}\n"
    again, watcher = follow(bundle, load_backend, restore=restore)
    watcher.close()
    assert version(again) == first


def test_an_outcome_labelled_after_the_end_counts_instead_of_the_first(bundle: Path) -> None:
    versions = Versions(load_backend(bundle), rule=RollbackRule(episodes=2))
    first = version(versions)
    for episode in ("a", "b"):
        versions.report(ended(first, "failure"), episode=episode)
        assert versions.count_outcome(episode, "success") == ""
    versions.report(ended(first, "unknown"), episode="c")
    versions.report(ended(first, "failure", intervened=1), episode="d")
    versions.count_outcome("d", "success")  # a person helped
    assert (versions.summary()[0]["episodes"], versions.summary()[0]["success"]) == (3, 2 / 3)
    versions.count_outcome("c", "success")
    versions.count_outcome("d", "unknown")
    assert (versions.summary()[0]["episodes"], versions.summary()[0]["success"]) == (3, 1.0)
    versions.count_outcome("d", None)  # as it was reported
    assert (versions.summary()[0]["episodes"], versions.summary()[0]["success"]) == (4, 0.75)
    versions.count_outcome("d", "unknown")
    second = write(bundle, 2)
    versions.offer(load_backend(bundle))
    for episode in ("e", "f"):
        assert versions.report(ended(second, "success"), episode=episode) == ""
    assert versions.count_outcome("f", "failure").endswith("success fell from 100% to 50% in 2 episodes")


def test_a_server_ends_when_its_parent_is_killed(bundle: Path, tmp_path: Path) -> None:
    """As ``vla-rl deploy`` starts it."""
    token, ready = tmp_path / "token", tmp_path / "ready"
    token.write_text(TOKEN)
    program = textwrap.dedent("""
        import subprocess, sys, time
        server = subprocess.Popen([sys.executable, "-m", "real_robot.serving.commands", *sys.argv[1:],
                                   "--end-with-stdin"],
                                  stdin=subprocess.PIPE)
        print(server.pid, flush=True)
        time.sleep(600)
    """)
    command = [sys.executable, "-c", program, str(bundle), str(token), str(ready)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        server = Path(f"/proc/{int(parent.stdout.readline())}")
        wait_until(lambda: ready.exists(), 120)
        assert server.exists()
        parent.kill()
        wait_until(lambda: not server.exists() or "State:\tZ" in (server / "status").read_text(), 20)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_programs_that_start_at_once_read_one_whole_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with ThreadPoolExecutor(4) as programs:
        for i in range(50):
            monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / str(i)))
            tokens = set(programs.map(lambda _: default_token_file().read_text(), range(4)))
            assert len(tokens) == 1
            assert len(tokens.pop()) == 33
            (file,) = (tmp_path / str(i) / "vla-rl").iterdir()
            assert file.stat().st_mode & 0o777 == 0o600
