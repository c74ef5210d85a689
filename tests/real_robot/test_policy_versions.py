"""Hot swap and roll-back: real bundles on disk, a real server and client."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from policies.bundle import read_bundle_info, save_bundle
from real_robot.serving.client import PolicyClient
from real_robot.serving.protocol import ActRequest, EpisodeEnd
from real_robot.serving.registry import load_backend
from real_robot.serving.server import PolicyServer, ServerConfig
from real_robot.serving.versions import BundleWatcher, RollbackRule, Versions
from tests.real_robot.small_policies import other_robot, small_policy

TOKEN = "0123456789abcdef"
WON, LOST = EpisodeEnd(outcome="success", intervened=0), EpisodeEnd(outcome="failure", intervened=0)


def write(path: Path, seed: int, action_dim: int = 4) -> str:
    """An untrained bundle; its fingerprint."""
    return save_bundle(small_policy(seed=seed, robot=other_robot(action_dim=action_dim)), path).sha256


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    path = tmp_path / "bundle"
    write(path, 1)
    return path


def version(versions: Versions) -> str:
    return versions.current.hello.fingerprint


def test_a_worse_version_is_rolled_back_and_not_offered_again(bundle: Path) -> None:
    versions = Versions(load_backend(bundle), rule=RollbackRule(episodes=4, success_drop=0.3))
    first = version(versions)
    for ended in (WON, WON, LOST, WON):
        assert versions.report(first, ended) == ""
    second = write(bundle, 2)
    versions.offer(load_backend(bundle))
    assert version(versions) == second
    assert [versions.report(second, LOST) for _ in range(3)] == ["", "", ""]
    assert versions.report(second, EpisodeEnd(outcome="unknown", intervened=0)) == ""
    assert versions.report(first, WON) == ""  # a slow robot's last episode counts for the version it ran
    news = versions.report(second, LOST)
    assert news.endswith("success fell from 80% to 0% in 4 episodes")
    assert version(versions) == first
    with pytest.raises(ValueError, match="was rolled back before"):
        versions.offer(load_backend(bundle))


def test_a_bundle_with_weights_that_are_not_numbers_is_not_served(bundle: Path) -> None:
    versions = Versions(load_backend(bundle))
    first = version(versions)
    policy = small_policy(seed=2, robot=other_robot(action_dim=4))
    for parameter in policy.parameters():
        parameter.data.fill_(1e17)  # finite, but nothing computed from it is
    broken = save_bundle(policy, bundle).sha256
    with pytest.raises(ValueError, match="gives actions that are not finite"):
        load_backend(bundle)
    watcher = BundleWatcher(versions, bundle, load_backend)
    time.sleep(2.5)  # longer than it takes to notice a new bundle
    watcher.close()
    assert version(versions) == first != broken


def test_a_version_that_fails_while_it_serves_is_rolled_back_at_once(bundle: Path) -> None:
    versions = Versions(load_backend(bundle))
    first, second = version(versions), write(bundle, 2)
    assert versions.report_fault(first, "not finite") == ""  # there is none before it
    versions.offer(load_backend(bundle))
    assert version(versions) == second
    assert versions.report_fault(second, "not finite").endswith(f"to {first[:12]}: not finite")
    assert version(versions) == first
    assert versions.knows(second)


def test_more_interventions_roll_back_and_an_equal_version_stays(bundle: Path) -> None:
    versions = Versions(load_backend(bundle), rule=RollbackRule(episodes=2))
    first = version(versions)
    second = write(bundle, 2)
    for fingerprint in (first, first):
        versions.report(fingerprint, WON)
    versions.offer(load_backend(bundle))
    assert [versions.report(second, WON) for _ in range(10)] == [""] * 10
    helped = EpisodeEnd(outcome="success", intervened=1)
    said = [versions.report(second, helped) for _ in range(5)]
    assert any("interventions rose from 0%" in news for news in said)
    assert version(versions) == first


def test_three_versions_are_kept_and_one_for_another_robot_is_refused(bundle: Path) -> None:
    versions = Versions(load_backend(bundle))
    seen = [version(versions)]
    for seed in (2, 3, 4):
        seen.append(write(bundle, seed))
        versions.offer(load_backend(bundle))
    assert not versions.knows(seen[0])
    assert all(versions.knows(fingerprint) for fingerprint in seen[1:])
    write(bundle, 5, action_dim=3)
    with pytest.raises(ValueError, match="for another robot"):
        versions.offer(load_backend(bundle))
    assert version(versions) == seen[-1]


@pytest.fixture
def serving(bundle: Path) -> Iterator[tuple[Path, PolicyClient]]:
    """A server that follows the bundle, and a client of it."""
    versions = Versions(load_backend(bundle))
    follower = BundleWatcher(versions, bundle, load_backend)
    ready, stop, ports = threading.Event(), threading.Event(), []

    async def main() -> None:
        async with PolicyServer(versions, ServerConfig(port=0, token=TOKEN)) as running:
            ports.append(running.port)
            ready.set()
            await asyncio.to_thread(stop.wait)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    client = PolicyClient(f"ws://127.0.0.1:{ports[0]}", token=TOKEN, timeout_s=30.0)
    yield bundle, client
    client.close()
    follower.close()
    stop.set()
    thread.join()


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
    act = ActRequest(
        id=1, images={"agent": np.zeros((32, 32, 3), np.uint8)}, state=np.zeros(5, np.float32), instruction="x",
        method="replace", leftover=np.zeros((0, 4), np.float32), delay=0, execute_steps=4,
    )  # fmt: skip
    client.ask(act)
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
