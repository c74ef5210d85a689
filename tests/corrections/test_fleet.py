"""Many robots and one hub: deliveries over connections that break, versions, who needs help, the page in a browser."""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import random
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser
from pydantic import ValidationError

from benchmarks.fleet import Fleet, Proxy
from episodes.files import write_atomically
from episodes.overlays import append_changes, read_changes
from episodes.schema import EpisodeError
from episodes.store import EpisodeStore
from policies.bundle import BundleError, bundle_version, install_bundle, read_bundle_info, save_bundle
from policies.policy import RobotSpec
from real_robot.corrections.server import CorrectionServer
from real_robot.corrections.web import Address
from real_robot.fleet.bundle_fetch import BundleFetch
from real_robot.fleet.client import HubClient, HubRefused
from real_robot.fleet.deliveries import DamagedDelivery, Deliveries
from real_robot.fleet.hub import Hub, NameTaken
from real_robot.fleet.messages import CHANGES, REPORT, Report, report_of
from real_robot.fleet.outbox import Outbox
from real_robot.fleet.server import JOIN, serving_fleet
from real_robot.serving.published import KEPT, PublishedVersions
from sims.errors import UserError
from sims.subproc.termination import Terminated
from tests.corrections.scripted_operator import open_session
from tests.corrections.small_server import server, write_bundle
from tests.episodes.episode_examples import make_episode
from tests.real_robot.small_policies import change_settings, small_policy
from vla_rl.runners.corrections import correct, fleet, join_fleet
from vla_rl.runs.run_dir import lock_folder

WELL = Report(
    instance="0" * 16, mode="policy", reason="", task="reach", episode=3, person=None, version="0" * 64, episodes=4,
    success=1.0, interventions=0.0, disagreement=None, undelivered=0,
)  # fmt: skip
HUB = Address()
ROBOT = RobotSpec.recorded(make_episode())


def until(met: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not met():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def publish(folder: Path, seed: int) -> None:
    save_bundle(small_policy(robot=ROBOT, seed=seed), folder / "bundle")


def episode_file(folder: Path) -> tuple[str, bytes, str]:
    """Id, content and SHA-256 of an episode."""
    with EpisodeStore(folder, create=True) as store:
        id = store.add(make_episode())
        data = store.file(id).read_bytes()
    return id, data, hashlib.sha256(data).hexdigest()


def test_an_episode_arrives_once_whatever_is_sent_twice_or_cut_off(tmp_path: Path):
    id, data, digest = episode_file(tmp_path / "robot")

    def send(offset: int, end: int) -> tuple[int, bool]:
        """To a hub that has just been started again."""
        hub = Deliveries(tmp_path / "episodes", tmp_path / "incoming")
        there = hub.receive(id, digest, size=len(data), offset=offset, data=data[offset:end])
        return there.bytes, there.done

    assert send(0, 100) == (100, False)
    assert send(0, 100) == (100, False)  # its acknowledgement was lost
    assert send(500, 600) == (100, False)  # not what comes next
    assert send(100, 1000) == (1000, False)
    assert send(1000, len(data)) == (len(data), True)
    assert send(1000, len(data)) == (0, True)
    with EpisodeStore(tmp_path / "episodes") as store:
        assert [entry.id for entry in store.entries()] == [id]
        assert store.file(id).read_bytes() == data
    assert list((tmp_path / "incoming").iterdir()) == []


def test_a_damaged_delivery_is_refused_and_can_be_sent_again(tmp_path: Path):
    id, data, digest = episode_file(tmp_path / "robot")
    hub = Deliveries(tmp_path / "episodes", tmp_path / "incoming")
    with pytest.raises(DamagedDelivery, match="another SHA-256"):
        hub.receive(id, digest, size=len(data), offset=0, data=data[:-1] + b"x")
    other = "0" * 26
    with pytest.raises(EpisodeError, match=f"is episode {id}"):
        hub.receive(other, digest, size=len(data), offset=0, data=data)
    with pytest.raises(EpisodeError, match="corrupt"):
        hub.receive(id, hashlib.sha256(data[:-9]).hexdigest(), size=len(data) - 9, offset=0, data=data[:-9])
    assert hub.received(id, digest).bytes == 0
    assert hub.receive(id, digest, size=len(data), offset=0, data=data).done


def test_versions_are_counted_and_the_one_before_is_published_again(tmp_path: Path):
    with pytest.raises(BundleError):
        PublishedVersions(tmp_path / "bundle").newest()
    names = []
    for seed in range(3):
        publish(tmp_path, seed)
        names.append(PublishedVersions(tmp_path / "bundle").newest())  # also over a restart
    versions = PublishedVersions(tmp_path / "bundle")
    assert [versions.behind(name) for name in (*names, "unknown")] == [2, 1, 0, 3]
    hub = Hub(versions, max_behind=3)
    assert hub.roll_back(names[2]) == (names[2], names[1])
    assert bundle_version(tmp_path / "bundle") == names[1] == PublishedVersions(tmp_path / "bundle").newest()
    assert [versions.behind(name) for name in names] == [1, 0, 0]
    assert hub.roll_back(names[2]) is None  # asked twice, or by somebody who has not seen the newest
    assert hub.roll_back(names[1]) == (names[1], names[0])
    assert hub.roll_back(names[0]) is None
    assert PublishedVersions(tmp_path / "bundle").rolled_back == [names[2], names[1]]
    kept = versions.folder(names[2])
    with pytest.raises(BundleError, match="damaged"):
        install_bundle(tmp_path / "bundle", manifest=(kept / "bundle.json").read_bytes(), tensors=b"other weights")
    assert bundle_version(tmp_path / "bundle") == names[0]


def test_a_roll_back_of_the_fleet_that_cannot_be_written_is_said_once_and_written_when_it_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    publish(tmp_path, 0)
    versions = PublishedVersions(tmp_path / "bundle")
    names = [versions.newest()]
    publish(tmp_path, 1)
    names.append(versions.newest())
    hub, full = Hub(versions, max_behind=0), True

    def write(path: Path, data: bytes) -> None:
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomically(path, data)

    for module in ("policies.bundle", "real_robot.serving.published"):
        monkeypatch.setattr(f"{module}.write_atomically", write)
    for _ in range(2):  # a second click
        assert hub.roll_back(names[1]) == (names[1], names[0])
    what = f"that {names[1][:12]} was rolled back"
    said = f"a restart forgets {what}, until it can be written: {tmp_path / 'published'}: no space left on device\n"
    current = replace(WELL, version=names[1])
    for _ in range(2):  # the robots go back at once
        assert hub.report("one", current).rolled_back == [names[1]]
    (row,) = hub.rows()
    assert (row["rolled_back"], bundle_version(tmp_path / "bundle")) == (True, names[1])
    full = False
    orders = hub.report("one", current)
    assert (orders.version, orders.rolled_back, orders.behind) == (names[0], [names[1]], 0)
    assert bundle_version(tmp_path / "bundle") == names[0]
    assert PublishedVersions(tmp_path / "bundle").rolled_back == [names[1]]
    assert capsys.readouterr().err == f"{said}it is written now {what}\n"


@pytest.mark.parametrize("restore", [False, True])
def test_a_version_that_cannot_be_put_there_again_is_served_nonetheless(
    tmp_path: Path, restore: bool, monkeypatch: pytest.MonkeyPatch
):
    """A full disk after the record was written."""
    publish(tmp_path, 0)
    versions = PublishedVersions(tmp_path / "bundle", restore=restore)
    names = [versions.newest()]
    publish(tmp_path, 1)
    names.append(versions.newest())

    def write(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr("policies.bundle.write_atomically", write)
        with pytest.raises(BundleError, match="no space left") if restore else nullcontext():
            versions.drop(names[1], names[0])
        assert versions.newest() == names[0]
    assert versions.newest() == names[0]
    assert bundle_version(tmp_path / "bundle") == names[0 if restore else 1]


def test_the_last_version_that_stood_is_kept_whatever_was_rolled_back_after_it(tmp_path: Path):
    publish(tmp_path, 0)
    versions = PublishedVersions(tmp_path / "bundle")
    good = versions.newest()
    for seed in range(1, KEPT + 2):
        publish(tmp_path, seed)
        failed = versions.newest()
        assert Hub(versions, max_behind=3).roll_back(failed) == (failed, good)
    publish(tmp_path, 1)  # put there once more
    assert versions.newest() == good == bundle_version(tmp_path / "bundle")


def test_what_a_robot_goes_back_to_is_kept_and_the_newest_after_a_restart(tmp_path: Path):
    publish(tmp_path, 0)
    versions = PublishedVersions(tmp_path / "bundle", restore=False)
    proven = versions.newest()
    for seed in range(1, KEPT + 2):
        publish(tmp_path, seed)
        failed = versions.newest(in_use=[proven])
    versions.drop(failed, proven)
    again = PublishedVersions(tmp_path / "bundle", restore=False)
    assert again.newest() == proven == bundle_version(again.folder(proven))


def test_a_roll_back_of_one_process_is_kept_by_the_others(tmp_path: Path):
    live = tmp_path / "bundle"
    names = []
    for seed in (0, 1):
        save_bundle(small_policy(seed=seed), live)
        names.append(PublishedVersions(live).newest())
    one, other = PublishedVersions(live), PublishedVersions(live)
    assert Hub(one, max_behind=3).roll_back(names[1]) == (names[1], names[0])
    save_bundle(small_policy(seed=2), live)
    newest = other.newest()
    for versions in (PublishedVersions(live), other):
        assert versions.rolled_back == [names[1]]
        assert versions.before(newest) == names[0]


def test_a_folder_has_one_hub(tmp_path: Path):
    write_bundle(tmp_path / "given")
    with lock_folder(tmp_path / "fleet"), pytest.raises(UserError, match="is being written by another process"):
        fleet(tmp_path / "given", tmp_path / "fleet", address=Address(), max_behind=3, browser=False)


def test_a_bundle_that_is_replaced_while_it_is_copied_is_not_taken_for_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    publish(tmp_path, 0)
    versions, learner = PublishedVersions(tmp_path / "bundle"), iter([1])

    def read(path: Path) -> str:
        version = bundle_version(path)
        for seed in learner:  # it publishes just after the first reading
            publish(tmp_path, seed)
        return version

    monkeypatch.setattr("real_robot.serving.published.bundle_version", read)
    with pytest.raises(BundleError, match="is being replaced"):
        versions.newest()
    newest = versions.newest()
    assert versions.order == [newest]
    assert bundle_version(versions.folder(newest)) == newest


def test_who_needs_help_most_comes_first(tmp_path: Path):
    now = [0.0]
    publish(tmp_path, 0)
    versions = PublishedVersions(tmp_path / "bundle")
    current = replace(WELL, version=versions.newest())
    hub = Hub(versions, max_behind=1, clock=lambda: now[0])
    hub.report("gone", replace(current, mode="hold"))
    now[0] = 60.0
    for name, report in {
        "well": current,
        "fails": replace(current, success=0.4),
        "waits": replace(current, mode="hold", reason="lost contact"),
        "helped": replace(current, mode="hold", person="Anna", interventions=0.3),
        "differs": replace(current, disagreement=0.5),
    }.items():
        hub.report(name, report)
    rows = hub.rows()
    assert [row["name"] for row in rows] == ["waits", "fails", "helped", "differs", "well", "gone"]
    assert [row["waits"] for row in rows] == [True, False, False, False, False, True]
    assert [row["silent"] for row in rows] == [False] * 5 + [True]
    for seed in (1, 2):
        publish(tmp_path, seed)
        versions.newest()
    assert hub.report("well", current).paused == "the policy is 2 versions old"


def test_a_person_with_a_long_name_keeps_no_robot_from_reporting():
    """Whoever is invited has the names of all who invited before in theirs."""
    name = "operator"
    for number in range(6):
        name = f"operator {number} invited by {name}"
    state: dict[str, Any] = {
        "versions": [{"episodes": 0, "success": None, "interventions": None}],
        "disagreement": [], "actors": "", "mode": "human", "reason": "", "task": "reach", "episode": 1, "holder": name,
    }  # fmt: skip
    for holder in (name, None):
        one = report_of(state | {"holder": holder}, instance="0" * 16, version="0" * 64, undelivered=0, page=None)
        read = REPORT.validate_json(REPORT.dump_json(one))
        assert read.person == (None if holder is None else name[:100])


def test_of_two_robots_of_one_name_the_second_is_refused_while_the_first_reports(tmp_path: Path):
    now = [0.0]
    publish(tmp_path, 0)
    hub = Hub(PublishedVersions(tmp_path / "bundle"), max_behind=1, clock=lambda: now[0])
    other = replace(WELL, instance="1" * 16)
    hub.report("out", replace(WELL, mode="hold", page="https://first"))
    for now[0] in (0.0, 9.0):
        with pytest.raises(NameTaken, match="named out: start this one with another --out"):
            hub.report("out", other)
    assert [row["waits"] for row in hub.rows()] == [True]
    now[0] = 20.0
    assert hub.report("out", other).wants_page
    assert hub.take_page("out") is None  # not that of the first
    with serving_fleet(tmp_path, address=HUB, max_behind=3):
        client = HubClient(tmp_path / JOIN)
        client.report("out", WELL)
        with pytest.raises(HubRefused, match=r"answered 409: .*another robot of the fleet is named out"):
            client.report("out", other)


def test_the_hub_lets_nobody_in_without_its_token(tmp_path: Path):
    publish(tmp_path, 0)
    with serving_fleet(tmp_path, address=HUB, max_behind=3):
        join = json.loads((tmp_path / JOIN).read_text())
        assert (tmp_path / JOIN).stat().st_mode & 0o777 == 0o600
        version = bundle_version(tmp_path / "bundle")

        def ask(method: str, path: str, token: str, body: bytes | None = None) -> int:
            with closing(http.client.HTTPConnection(urlsplit(join["address"]).netloc, timeout=60)) as connection:
                connection.request(method, path, body, {"Authorization": f"Bearer {token}"})
                answer = connection.getresponse()
                answer.read()
                return answer.status

        episode = f"/robots/episodes/{'0' * 26}?sha256={version}"
        assert ask("GET", episode, "wrong") == 401
        assert ask("GET", episode, join["token"]) == 200
        assert ask("GET", f"/robots/bundles/{version}/bundle.json", "") == 401
        assert ask("GET", f"/robots/bundles/{version}/bundle.json", join["token"]) == 200
        assert ask("GET", f"/robots/bundles/{version}/..%2fversions.json", join["token"]) == 404
        assert ask("GET", f"/robots/episodes/..%2frobots?sha256={version}", join["token"]) in (404, 422)
        assert ask("POST", "/robots/a/report", join["token"], b"{}") == 400
        assert ask("PUT", f"{episode}&size=9&offset=0", join["token"], bytes((1 << 20) + 1)) == 413
        assert ask("GET", "/api/fleet", join["token"]) == 401  # people's, with a session
    with serving_fleet(tmp_path, address=HUB, max_behind=3):
        assert json.loads((tmp_path / JOIN).read_text())["token"] == join["token"]


def test_an_episode_of_which_the_hub_kept_other_bytes_is_sent_again_from_its_beginning(tmp_path: Path):
    """As after a power failure at the hub."""
    publish(tmp_path, 0)
    id, data, digest = episode_file(tmp_path / "robot" / "episodes")
    with serving_fleet(tmp_path, address=HUB, max_behind=3):
        client = HubClient(tmp_path / JOIN)
        client.send(id, digest, size=len(data), offset=0, data=bytes(100))
        outbox = Outbox(tmp_path / "robot", client)
        with pytest.raises(HubRefused, match=r"answered 409: .*episode .* arrived with another SHA-256"):
            outbox.deliver(time.monotonic() + 60)
        assert outbox.deliver(time.monotonic() + 60)
        assert outbox.waiting() == []
    with EpisodeStore(tmp_path / "episodes") as store:
        assert store.file(id).read_bytes() == data


class CutsEveryConnection(random.Random):
    """For a Proxy: each connection ends after 100,000 bytes."""

    def random(self) -> float:
        return 0.05

    def randint(self, a: int, b: int) -> int:
        return 100_000


def test_a_bundle_is_fetched_over_connections_that_all_break(tmp_path: Path) -> None:
    publish(tmp_path, 0)
    info, version = read_bundle_info(tmp_path / "bundle"), bundle_version(tmp_path / "bundle")
    with serving_fleet(tmp_path, address=HUB, max_behind=3):
        join = json.loads((tmp_path / JOIN).read_text())
        proxy = Proxy(urlsplit(join["address"]).port or 0, CutsEveryConnection())
        proxy.disturbs = True
        (tmp_path / "join").write_text(json.dumps(join | {"address": f"http://127.0.0.1:{proxy.port}"}))
        fetch, broken, fetched = BundleFetch(HubClient(tmp_path / "join")), 0, None
        while fetched is None:
            try:
                fetched = fetch.go_on(version, time.monotonic() + 60)
            except (OSError, http.client.HTTPException):
                broken += 1
                assert broken < 10 and fetch.version == version
        proxy.close()
        manifest, tensors = fetched
        assert broken >= 2 and fetch.version == ""
        install_bundle(tmp_path / "installed", manifest=manifest, tensors=tensors)
        assert read_bundle_info(tmp_path / "installed") == info
        direct = BundleFetch(HubClient(tmp_path / JOIN))
        assert direct.go_on(version, time.monotonic()) is None and direct.version == version
        with pytest.raises(HubRefused, match="no such bundle"):
            direct.go_on("0" * 64, time.monotonic() + 60)
        assert direct.version == ""


def test_a_damaged_file_of_the_hub_is_said(tmp_path: Path):
    publish(tmp_path, 0)
    (tmp_path / JOIN).write_text("")  # after a power failure
    with pytest.raises(UserError, match="is damaged: remove it"), serving_fleet(tmp_path, address=HUB, max_behind=3):
        pass


@pytest.mark.parametrize(("key", "value", "valid"), [("trim", "2-5", True), ("split", 3, True), ("note", "abc", True),
    ("trim", None, True), ("trim", "abc", False), ("trim", "9-2", False), ("trim", 3, False), ("split", "abc", False),
    ("split", True, False)])  # fmt: skip
def test_a_cut_that_would_keep_the_hub_from_reading_is_refused(key: str, value: object, valid: bool):
    change = {"episode": "0" * 26, "key": key, "value": value, "author": "anna", "time_s": 1.0}
    with nullcontext() if valid else pytest.raises(ValidationError, match=r"(trim|split) is .*, not (two|a) step"):
        CHANGES.validate_json(json.dumps([change]))


def test_an_undo_that_is_delivered_later_takes_back_the_line_at_the_hub(tmp_path: Path):
    """As a message: without what was delivered before, and from a robot of an older version."""
    robot, hub = tmp_path / "robot", tmp_path / "hub"
    hub.mkdir()
    with EpisodeStore(robot, create=True) as own:
        id = own.add(make_episode())
        shutil.copy(own.file(id), hub)
        with EpisodeStore(hub) as opened:
            opened.label(id, "note", "first line", author="hub")
        own.label(id, "success", True, author="Anna")
        own.undo(id, author="Anna")
        for change in read_changes(robot):
            append_changes(hub, CHANGES.validate_json(CHANGES.dump_json([change])))
        append_changes(hub, [replace(change, undone=None) for change in read_changes(robot)])
        with EpisodeStore(hub) as opened:
            assert [change.undoes for change in opened.history(id)] == [None, None, 1]
            assert opened.undo(id, author="hub").key == "note"  # type: ignore[union-attr]


def test_an_episode_that_the_hub_refuses_stops_no_other_and_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    publish(tmp_path, 0)
    damaged, intact = (episode_file(tmp_path / "robot" / "episodes")[0] for _ in range(2))
    with EpisodeStore(tmp_path / "robot" / "episodes") as store:
        store.label(intact, "success", True, author="anna")
        file = store.file(damaged)
    file.write_bytes(file.read_bytes()[:-9])
    with serving_fleet(tmp_path, address=HUB, max_behind=3):
        outbox = Outbox(tmp_path / "robot", HubClient(tmp_path / JOIN))
        capsys.readouterr()
        assert [outbox.deliver(time.monotonic() + 60) for _ in range(3)] == [True] * 3
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith(f"episode {damaged} is not delivered and stays in {file}: the hub answered 422: ")
        assert outbox.waiting() == [damaged]
        assert file.exists()
    with EpisodeStore(tmp_path / "episodes") as store:
        assert [entry.id for entry in store.entries()] == [intact]
        assert store.labels(intact) == {"success": True}


def test_labels_do_not_wait_until_no_episode_is_left(tmp_path: Path):
    publish(tmp_path, 0)
    first, second = (episode_file(tmp_path / "robot" / "episodes")[0] for _ in range(2))
    with EpisodeStore(tmp_path / "robot" / "episodes") as store, serving_fleet(tmp_path, address=HUB, max_behind=3):
        store.label(second, "outcome", "abort", author="anna")
        client = HubClient(tmp_path / JOIN)
        digest = hashlib.sha256(store.file(first).read_bytes()).hexdigest()
        client.send(first, digest, size=store.file(first).stat().st_size, offset=0, data=bytes(100))
        with pytest.raises(HubRefused, match="answered 409"):  # the first episode breaks the delivery off
            Outbox(tmp_path / "robot", client).deliver(time.monotonic() + 60)
        assert [change.episode for change in read_changes(tmp_path / "episodes")] == [second]
        store.label(second, "outcome", "failure", author="anna")
        assert Outbox(tmp_path / "robot", client).deliver(time.monotonic() - 1) is False
        assert Outbox(tmp_path / "robot", client).deliver(time.monotonic() + 60)
    with EpisodeStore(tmp_path / "episodes") as store:
        assert store.labels(second) == {"outcome": "failure"}


def test_an_older_bundle_that_is_published_again_serves_unless_the_robot_rolled_it_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    def put(seed: int) -> str:
        return bundle_version(write_bundle(tmp_path / "bundle", seed=seed))

    first = put(7)
    with server(tmp_path) as one, serving_fleet(tmp_path, address=HUB, max_behind=0):
        versions = one.robot.session.versions

        def serves(version: str) -> None:
            until(lambda: versions.current.hello.fingerprint == version, "the bundle is taken up")

        with closing(join_fleet(one, tmp_path / JOIN)):
            serves(first)
            second = put(8)
            serves(second)
            put(7)
            serves(first)
            until(lambda: not one.robot.session.paused, "it is the newest at the hub, too")
            versions.report_fault(second, "by hand")
            put(8)
            output = ""

            def said() -> bool:
                nonlocal output
                output += capsys.readouterr().err
                return "the fleet's policy is not served" in output

            until(said, "that it is not served")
            assert f"version {second[:12]} was rolled back before: by hand" in output
            time.sleep(2.5)
            assert "not served" not in capsys.readouterr().err
            assert versions.current.hello.fingerprint == first


def test_settings_that_are_corrected_at_the_hub_reach_a_robot_that_has_the_weights(tmp_path: Path):
    """Also where the version with the former settings was rolled back."""
    live = write_bundle(tmp_path / "bundle", seed=7)
    with server(tmp_path) as one, serving_fleet(tmp_path, address=HUB, max_behind=3):
        versions = one.robot.session.versions
        with closing(join_fleet(one, tmp_path / JOIN)):
            for denoising_steps in (1, 2):
                change_settings(live, denoising_steps)
                given = bundle_version(live)
                until(lambda version=given: versions.current.hello.fingerprint == version, "the settings are taken up")  # type: ignore[misc]
                assert read_bundle_info(one.folder / "bundle").config == read_bundle_info(live).config
                if denoising_steps == 1:
                    versions.report_fault(given, "by hand")
        assert given not in versions.rolled_back


def test_a_version_that_is_not_what_the_hub_says_is_not_installed(tmp_path: Path):
    publish(tmp_path, 0)
    version = bundle_version(tmp_path / "bundle")
    with serving_fleet(tmp_path, address=HUB, max_behind=3):
        change_settings(PublishedVersions(tmp_path / "bundle").folder(version), 1)
        fetch = BundleFetch(HubClient(tmp_path / JOIN))
        with pytest.raises(HubRefused, match=f"what the hub keeps as version {version[:12]} was changed there"):
            fetch.go_on(version, time.monotonic() + 60)
        assert fetch.version == ""


def test_a_wrong_file_or_name_is_said(tmp_path: Path):
    (tmp_path / JOIN).write_text("{}")
    with server(tmp_path) as one, pytest.raises(UserError, match="vla-rl fleet writes it"):
        join_fleet(one, tmp_path / JOIN)


def test_people_who_come_from_the_page_of_the_fleet_have_names_of_their_own(tmp_path: Path):
    publish(tmp_path, 0)
    with server(tmp_path) as one, serving_fleet(tmp_path, address=HUB, max_behind=3) as opened:
        origin, cookie = open_session(opened)

        def name() -> str:
            """On the robot's page, of the next person who opens it."""
            with closing(http.client.HTTPConnection(urlsplit(origin).netloc, timeout=60)) as connection:
                connection.request("POST", "/api/fleet/out/open", headers={"Cookie": cookie, "Origin": origin})
                answer = connection.getresponse()
                body = json.loads(answer.read())
                return person(body["address"]) if answer.status == 200 else ""

        def person(address: str) -> str:
            found = one.access.person({one.access.cookie: one.access.redeem(address.rpartition("=")[2]) or ""})
            return "" if found is None else found.name

        names: list[str] = []
        with closing(join_fleet(one, tmp_path / JOIN)):
            for number in (1, 2):
                until(lambda n=number: len(names) == n or names.extend(filter(None, [name()])), "the page is offered")  # type: ignore[misc]
        assert len(set(names)) == 2
        assert all(name.startswith("operator ") and name.endswith(" of the fleet") for name in names)


def test_a_version_that_cannot_be_installed_keeps_no_episode_back(tmp_path: Path):
    write_bundle(tmp_path / "bundle", seed=7)
    with server(tmp_path) as one, serving_fleet(tmp_path, address=HUB, max_behind=3):
        tensors = tmp_path / "published" / bundle_version(tmp_path / "bundle")[:12]
        shutil.rmtree(tensors)  # the hub answers 404 for it
        one.robot.command(lambda: one.robot.session.end("failure", person="Anna")).result(30)
        with closing(join_fleet(one, tmp_path / JOIN)):
            until(lambda: list((tmp_path / "episodes").glob("ep-*")), "the episode arrives")


def test_a_robot_of_another_kind_keeps_its_policy_and_the_hub_takes_none_of_its_episodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    publish(tmp_path, 0)
    with serving_fleet(tmp_path, address=HUB, max_behind=3):
        with server(tmp_path) as one:
            own = read_bundle_info(one.folder / "bundle")
            one.robot.command(lambda: one.robot.session.end("failure", person="Anna")).result(30)
            said = ""

            def all_said() -> bool:
                nonlocal said
                said += capsys.readouterr().err
                return "made for another robot: action_dim 3, not 7" in said and "answered 422" in said

            with closing(join_fleet(one, tmp_path / JOIN)):
                until(all_said, "that the policy is not served, and the episode not taken")
            assert said.count("is not served") == said.count("is not delivered") == 1
            assert read_bundle_info(one.folder / "bundle") == own
        with server(tmp_path) as again:
            assert again.robot.session.backend.hello.fingerprint == bundle_version(again.folder / "bundle")
    with EpisodeStore(tmp_path / "episodes") as store:
        assert store.entries() == []


def test_the_robot_is_at_rest_before_a_hub_that_does_not_answer_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("real_robot.fleet.client.TIMEOUT_S", 60.0)
    stored, in_time = threading.Event(), []

    @contextmanager
    def opened() -> Iterator[CorrectionServer]:
        try:
            with server(tmp_path) as one:
                yield one
        finally:
            stored.set()

    with socket.create_server(("127.0.0.1", 0)) as silent:
        join = {"address": f"http://127.0.0.1:{silent.getsockname()[1]}", "token": "t"}
        (tmp_path / JOIN).write_text(json.dumps(join))

        def terminate() -> None:
            connection, _ = silent.accept()  # the robot's report
            with connection:
                os.kill(os.getpid(), signal.SIGTERM)
                in_time.append(stored.wait(30))

        thread = threading.Thread(target=terminate)
        thread.start()
        with pytest.raises(Terminated):
            correct(opened(), tmp_path, browser=False, fleet=tmp_path / JOIN)
        thread.join()
    assert in_time == [True]


@pytest.mark.skipif(shutil.which("chromium") is None, reason="chromium is not installed")
def test_a_robot_delivers_learns_and_is_helped_from_the_page_of_the_fleet(chromium: Browser, tmp_path: Path):
    write_bundle(tmp_path / "bundle", seed=7)
    with server(tmp_path, pace=0.5) as one, serving_fleet(tmp_path, address=HUB, max_behind=3) as opened:
        session, versions = one.robot.session, one.robot.session.versions
        one.robot.command(lambda: session.end("failure", person="Anna")).result(30)
        id = session.last_episode
        with closing(join_fleet(one, tmp_path / JOIN)):
            page = chromium.new_page(viewport={"width": 390, "height": 844})
            page.goto(opened)
            page.wait_for_selector("#robot-out.waits")
            first = page.text_content("#robot-out") or ""
            assert "Waits for a person: the episode has ended" in first
            assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
            for scheme in ("light", "dark"):
                page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
                found = Axe().run(page).response["violations"]
                serious = [
                    (one["id"], one["nodes"][0]["html"]) for one in found if one["impact"] in ("serious", "critical")
                ]
                assert serious == []
            # its episode, with the label, and the hub's bundle
            until(lambda: list((tmp_path / "episodes").glob(f"ep-{id}*")), "the episode arrives")
            with EpisodeStore(tmp_path / "episodes") as store:
                until(lambda: store.labels(id or "") == {"outcome": "failure", "success": False}, "its labels arrive")
            given = versions.current.hello.fingerprint
            published = bundle_version(tmp_path / "bundle")
            until(lambda: versions.current.hello.fingerprint == published, "the bundle is taken up")
            # by keyboard: its page, where a person helps
            page.focus("#robot-out button")
            with page.expect_popup() as popup:
                page.keyboard.press("Enter")
            robot_page = popup.value
            robot_page.wait_for_selector("#mode[data-mode=ended]")
            robot_page.keyboard.press("n")
            page.wait_for_selector("#robot-out:not(.waits)")
            # and back to the version before
            write_bundle(tmp_path / "bundle", seed=8)
            worse = bundle_version(tmp_path / "bundle")
            until(lambda: versions.current.hello.fingerprint == worse, "the next bundle is taken up")
            page.wait_for_selector(f"#published >> text={worse[:8]}")
            page.focus("#rollback")
            page.keyboard.press("Enter")
            page.wait_for_selector("#done >> text=is rolled back")
            until(lambda: versions.current.hello.fingerprint == published, "the robot goes back")
            assert given in versions.kept


@pytest.mark.slow
def test_nothing_is_lost_or_doubled_while_everything_is_killed_and_the_network_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    fleet = Fleet(tmp_path, 2, random.Random(0))
    try:
        fleet.disturb(20.0, 3.0)
        fleet.recover()
        hung = list(fleet.hangs)
        monkeypatch.setattr("benchmarks.fleet.HANG_S", 5.0)
        stopped = fleet.processes["robot-1"].pid
        assert stopped is not None
        os.kill(stopped, signal.SIGSTOP)
        fleet.recover()
        fleet.drain()
    finally:
        fleet.close()
    counted = fleet.compared()
    assert hung == [] and "robot-1" in fleet.hangs
    assert sum(fleet.killed.values()) > 0
    assert (counted["lost"], counted["duplicated"]) == (0, 0)
    assert counted["stored"] > 1
