"""Rollouts on a real Ray cluster: the same numbers as in one process, also where processes die, hang or are stopped."""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.vla_rl.scale_run import GRPO, PPO, experiment, numbers, run_to_end
from vla_rl.config.cluster import ClusterConfig

# Not imported here: Ray reads its settings from the environment when it is imported.
pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'vla-rl[ray]'"),
]

HANG_S = 5.0
HEAD = """
import ray, sys
ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Of a cluster that lives as long as this module's tests."""
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}  # of this cluster alone
    environment = os.environ | {"RAY_worker_niceness": "0", "PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-W", "ignore", "-c", HEAD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    ) as head:
        assert head.stdout is not None and head.stdin is not None
        lines = iter(head.stdout.readline, "")
        yield next(line.strip() for line in lines if line.strip().rpartition(":")[2].isdigit())
        head.stdin.close()
    del os.environ["RAY_AUTH_MODE"], os.environ["RAY_AUTH_TOKEN"]


@pytest.fixture(scope="module")
def in_process(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Path:
    folder = tmp_path_factory.mktemp("in_process")
    run_to_end(folder, experiment())
    return folder


def cluster(address: str, **settings: object) -> ClusterConfig:
    return ClusterConfig(address=address, cpus=0.1, **settings)  # type: ignore[arg-type]


def events(folder: Path, kind: str) -> list[dict]:
    path = folder / "cluster.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [row for row in rows if row["event"] == kind]


def assert_same(folder: Path, expected: Path) -> None:
    assert numbers(folder) == numbers(expected)
    bundles = [load_file(next((one / "bundle").glob("*.safetensors"))) for one in (folder, expected)]
    assert bundles[0].keys() == bundles[1].keys()
    assert all((bundles[0][name] == bundles[1][name]).all() for name in bundles[0])


def disturb(folder: Path) -> threading.Thread:
    """SIGKILL to collector 0 after the first iteration, then SIGSTOP to collector 1 after the third."""

    def act() -> None:
        for collector, number, lines in ((0, signal.SIGKILL, 1), (1, signal.SIGSTOP, 3)):
            while len(numbers(folder)) < lines if (folder / "metrics.jsonl").exists() else True:
                time.sleep(0.005)
            os.kill([row["pid"] for row in events(folder, "started") if row["collector"] == collector][-1], number)

    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    return thread


def test_the_run_learns_something(in_process: Path) -> None:
    """Else the equalities below would be of runs in which nothing happens."""
    start, end = (load_file(next((in_process / part).glob("*.safetensors"))) for part in ("start", "bundle"))
    assert any((start[name] != end[name]).any() for name in start)
    assert all(row["kl"] > 0 for row in numbers(in_process)[2:])


@pytest.mark.slow
def test_two_collectors_one_killed_one_stopped_equal_one_process(
    tmp_path: Path, address: str, in_process: Path
) -> None:
    thread = disturb(tmp_path)
    run_to_end(tmp_path, experiment(cluster=cluster(address, hang_s=HANG_S)))
    thread.join(5)
    assert_same(tmp_path, in_process)
    assert [row["collector"] for row in events(tmp_path, "started")] == [0, 1, 0, 1]
    lost = events(tmp_path, "lost")
    assert [row["collector"] for row in lost] == [0, 1]
    assert "ActorDiedError" in lost[0]["cause"]
    assert f"took over {HANG_S:g} s" in lost[1]["cause"]
    trace = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in trace if event["name"] == "process_name"}
    assert names == {"iterations", "learner", "collector 0", "collector 1"}
    assert {"simulate", "encode", "infer", "learn", "sync", "idle"} <= {event["name"] for event in trace}


@pytest.mark.slow
def test_grpo_on_one_collector_equals_one_process(tmp_path: Path, address: str) -> None:
    run_to_end(tmp_path / "one", experiment(GRPO))
    run_to_end(tmp_path / "cluster", experiment(GRPO, cluster(address, collectors=1)))
    assert_same(tmp_path / "cluster", tmp_path / "one")


@pytest.mark.slow
def test_asynchronous_runs_are_exact_through_termination_and_places(tmp_path: Path, address: str) -> None:
    """Terminated in the middle and resumed with another number of collectors: as if nothing had happened."""
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    algorithm = replace(PPO, staleness=2, iterations=8)
    run_to_end(whole, experiment(algorithm, cluster(address, collectors=1)))
    rows = numbers(whole)
    assert [row["age_max"] for row in rows] == [0, 1, 2, 2, 2, 2, 2, 2]
    assert all(0 < row["effective_share"] <= 1 for row in rows[3:])

    command = [sys.executable, "-m", "tests.vla_rl.scale_run", str(stopped), address, "2", "8"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not (stopped / "metrics.jsonl").exists() or len(numbers(stopped)) < 3:
            time.sleep(0.01)
        asked = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    assert time.monotonic() - asked < 30
    assert 3 <= len(numbers(stopped)) < 8
    run_to_end(stopped, experiment(algorithm, cluster(address)))
    assert_same(stopped, whole)
