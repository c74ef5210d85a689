"""Rollouts on a real Ray cluster: the same numbers as in one process, also where processes die, hang or are stopped."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.numpy import load_file

from policies.bundle import save_bundle
from policies.policy import RobotSpec
from policies.registry import build_policy
from sims.errors import RunFailure, UserError
from sims.subproc.termination import Terminated
from tests.policies.small_configs import CONFIGS
from tests.vla_rl.scale_run import FLOW, GRPO, PPO, RLPD, SIM, SMALL, experiment, numbers, run_to_end, save_residual
from vla_rl.algorithms.algorithm import Algorithm
from vla_rl.algorithms.off_policy_settings import BestOfConfig
from vla_rl.config.cluster import ClusterConfig
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import Experiment
from vla_rl.distributed.arrays import PackedRecord
from vla_rl.rollouts.ahead import Asked
from vla_rl.rollouts.starts import UCBConfig
from vla_rl.runners.demonstrations import collect
from vla_rl.runners.reinforce import load_algorithm, place_rollouts
from vla_rl.runs.run_dir import open_run

if TYPE_CHECKING:
    from vla_rl.distributed.rollouts import ClusterRollouts

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


def disturb(folder: Path, signals: Sequence[tuple[int, int, int]]) -> threading.Thread:
    """``signals``: collector, signal and after how many iterations."""

    def act() -> None:
        for collector, number, lines in signals:
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
    thread = disturb(tmp_path, ((0, signal.SIGKILL, 1), (1, signal.SIGSTOP, 3)))
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
def test_auto_starts_a_cluster_where_there_is_none(tmp_path: Path, in_process: Path) -> None:
    """``RAY_TMPDIR``: where a process looks for that of this machine. Short: sockets have paths of 107 letters."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-m", "tests.vla_rl.scale_run", str(tmp_path / "run"), "auto", "0", "6"]
    with tempfile.TemporaryDirectory(prefix="ray-") as short:
        subprocess.run(command, check=True, timeout=300, env=ours | {"RAY_TMPDIR": short}, stderr=subprocess.DEVNULL)
    assert_same(tmp_path / "run", in_process)
    assert [row["collector"] for row in events(tmp_path / "run", "started")] == [0, 1]


AUTO = """
import ray, sys
from vla_rl.config.cluster import ClusterConfig
from vla_rl.distributed.cluster import connect, disconnect
connect(ClusterConfig(cpus=0.1), workers=1)
for line in sys.stdin:
    answer = ray.get(ray.remote(num_cpus=0.1)(lambda: ray.get_runtime_context().gcs_address).remote(), timeout=60)
    print(answer, flush=True)
disconnect()
"""


STRANGER = """
import ray, sys
try:
    ray.init(address=sys.argv[1], log_to_driver=False)
except ConnectionError as error:
    print(error, flush=True)
"""


@pytest.mark.slow
def test_runs_that_start_a_cluster_have_one_each() -> None:
    """The cluster of a run ends with it: another run that had joined it would be ended by Ray. Each wants a token of
    its own, which is not the user's for other clusters."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    command = [sys.executable, "-W", "ignore", "-c", AUTO]
    with tempfile.TemporaryDirectory(prefix="ray-") as short, ExitStack() as opened:
        token = Path(short) / "auth_token"
        token.write_text(secrets.token_hex(32))
        environment = ours | {
            "RAY_TMPDIR": short, "RAY_AUTH_TOKEN_PATH": str(token), "PYTHONPATH": str(Path(__file__).parents[2])
        }  # fmt: skip
        runs = []
        for _ in range(2):
            pipes = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                env=environment,
            )  # fmt: skip
            runs.append(opened.enter_context(pipes))
            opened.callback(pipes.kill)
            assert ask(pipes)  # it is up before the next one starts
        addresses = [ask(run) for run in runs]
        assert addresses[0] != addresses[1]
        stranger = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", STRANGER, addresses[0]], capture_output=True, text=True, timeout=120,
            env=environment | {"RAY_AUTH_MODE": "token"},
        )  # fmt: skip
        assert "InvalidAuthToken" in stranger.stdout + stranger.stderr
        runs[0].communicate(timeout=60)
        assert runs[0].returncode == 0
        assert ask(runs[1])
        runs[1].communicate(timeout=60)
        assert runs[1].returncode == 0


@pytest.mark.slow
def test_auto_joins_a_cluster_that_was_started_by_hand_with_the_users_token() -> None:
    """``ray start`` asks for it where there is one."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    ray_start = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--port=0", "--num-cpus=1", "--block"]
    with tempfile.TemporaryDirectory(prefix="ray-") as short, ExitStack() as opened:
        (Path(short) / ".ray").mkdir()
        (Path(short) / ".ray" / "auth_token").write_text(secrets.token_hex(32))
        environment = ours | {"HOME": short, "RAY_TMPDIR": short, "PYTHONPATH": str(Path(__file__).parents[2])}
        quiet = {"stderr": subprocess.DEVNULL, "env": environment}
        head = opened.enter_context(
            subprocess.Popen([*ray_start, "--include-dashboard=false"], stdout=subprocess.DEVNULL, **quiet)
        )
        opened.callback(head.terminate)
        noted = Path(short) / "ray" / "ray_current_cluster"
        while not noted.exists():
            assert head.poll() is None
            time.sleep(0.1)
        run = opened.enter_context(
            subprocess.Popen(
                [sys.executable, "-W", "ignore", "-c", AUTO], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                **quiet,
            )
        )  # fmt: skip
        opened.callback(run.kill)
        assert ask(run) == noted.read_text()


def ask(run: subprocess.Popen[str]) -> str:
    """The address of its cluster, from a task there; "" where the process has ended."""
    assert run.stdin is not None and run.stdout is not None
    run.stdin.write("\n")
    run.stdin.flush()
    lines = iter(run.stdout.readline, "")
    return next((line.strip() for line in lines if line.strip().rpartition(":")[2].isdigit()), "")


def test_an_address_without_a_cluster_is_one_message(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot join a Ray cluster at 127.0.0.1:1 .*ray start --head"):
        run_to_end(tmp_path, experiment(cluster=cluster("127.0.0.1:1")))


def test_a_version_of_ray_that_knows_no_tokens_starts_no_cluster(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where it is told to want one."""
    import ray

    from vla_rl.distributed.cluster import connect

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(ray, "init", lambda **options: pytest.fail("it was started"))
    monkeypatch.delattr(ray.exceptions, "AuthenticationError")
    with pytest.raises(UserError, match=r"of Ray knows no tokens, .* Install a newer one"):
        connect(ClusterConfig(), workers=1)


@pytest.mark.parametrize("address", [None, "auto", "local"])
@pytest.mark.parametrize(("workers", "cpus", "started"), [(5, 0.5, 3), (1, 2.5, 3), (3, 0.1, 1), (10, 0.3, 3)])
def test_a_cluster_that_is_started_holds_its_collectors(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, workers: int, cpus: float, started: int, address: str | None
) -> None:
    """Where a machine has fewer cores than they ask for; ``address``: RAY_ADDRESS."""
    import ray

    from vla_rl.distributed.cluster import connect

    asked: list[object] = []
    for name in ("RAY_ADDRESS", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    if address is not None:
        monkeypatch.setenv("RAY_ADDRESS", address)
    for name, value in (("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "0"), ("RAY_worker_niceness", "0")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    monkeypatch.setattr(ray, "init", lambda address, num_cpus, **options: asked.append((address, num_cpus)))
    connect(ClusterConfig(cpus=cpus), workers=workers)
    assert asked == [("local", started)]


def test_sigterm_while_ray_connects_is_one_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray exits with its number, 15, which no batch system takes for a run to be queued again."""
    import ray

    from vla_rl.distributed import cluster

    def killed(**options: object) -> None:
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))  # as ray.init does
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    monkeypatch.setattr(cluster, "_reach", lambda address: None)
    monkeypatch.setattr(ray, "init", killed)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as ended:
        cluster.connect(ClusterConfig(), workers=1)
    assert ended.value.exit_code == 143
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_stacks_file_that_another_process_removed_is_no_error(tmp_path: Path) -> None:
    """Nor does a process of another machine, which may have the same id, write the same one."""
    from vla_rl.distributed.worker import reporting_hangs, stacks_file

    path = tmp_path / stacks_file((0, 1), 245)
    with reporting_hangs(path, 60.0):
        path.unlink()
    with reporting_hangs(path, 0.1):
        time.sleep(1.0)
    assert "test_a_stacks_file" in path.read_text()
    assert stacks_file((2, 3), 245) != path.name


@pytest.mark.parametrize("folder", ["RAY_TMPDIR", "TMPDIR"])
def test_auto_joins_the_cluster_that_ray_start_noted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    """In the folder that it takes for its files."""
    import ray

    from vla_rl.distributed.cluster import connect

    asked: list[object] = []
    for name in ("RAY_ADDRESS", "RAY_TMPDIR", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(folder, str(tmp_path))
    monkeypatch.setattr(ray, "init", lambda address, **options: asked.append(address))
    (tmp_path / "ray").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        (tmp_path / "ray" / "ray_current_cluster").write_text(address)
        connect(ClusterConfig(), workers=1)
    assert asked == [address]


@pytest.mark.slow
def test_a_cluster_whose_collectors_cannot_be_made_is_left(tmp_path: Path, address: str) -> None:
    """A sweep goes on with its next trial, which connects again."""
    import ray

    wanted = experiment(cluster=cluster(address, collectors=1))
    env, run = make_env(wanted.sim), open_run(wanted, tmp_path, resume=False, command="")
    make = place_rollouts(run, tmp_path / "no bundle")
    assert make is not None
    policy = build_policy(SMALL, RobotSpec.of(env.spec))
    for _ in range(2):
        with pytest.raises(UserError, match="collector 0 cannot be made"):
            make(env, policy, failure_weight=0.0, seed=0)
        assert not ray.is_initialized()
    env.close()
    run.lock.close()


@pytest.mark.slow
def test_grpo_on_one_collector_equals_one_process(tmp_path: Path, address: str) -> None:
    run_to_end(tmp_path / "one", experiment(GRPO))
    run_to_end(tmp_path / "cluster", experiment(GRPO, cluster(address, collectors=1)))
    assert_same(tmp_path / "cluster", tmp_path / "one")


class Interrupted(Exception):
    """Stands for KeyboardInterrupt, which would end the test run."""


def interrupt() -> None:
    raise Interrupted


@pytest.mark.slow
def test_drawn_tasks_of_one_shard_are_exact_from_the_first_checkpoint_on(tmp_path: Path, address: str) -> None:
    algorithm = replace(GRPO, rollout_shards=1, task_ucb=UCBConfig())
    run_to_end(tmp_path / "one", experiment(algorithm))
    with pytest.raises(Interrupted):  # after the first iteration, with the checkpoint before it
        run_to_end(tmp_path / "cluster", experiment(algorithm, cluster(address)), recorded=interrupt)
    assert [path.stem for path in (tmp_path / "cluster/checkpoints").iterdir()] == ["iteration_000000"]
    run_to_end(tmp_path / "cluster", experiment(algorithm, cluster(address)))
    assert_same(tmp_path / "cluster", tmp_path / "one")


@pytest.mark.slow
def test_rlpd_with_two_actors_of_which_one_is_killed_equals_one_process(tmp_path: Path, address: str) -> None:
    """Half demonstrations; the actors get the weights after the updates that follow each chunk."""
    stores = (tmp_path / "demonstrations",)
    collect(replace(experiment(), sim=replace(SIM, max_steps=200)), episodes=4, out=stores[0])
    algorithm = replace(RLPD, stores=stores)
    for name, place in (("one", None), ("cluster", cluster(address))):
        save_residual(tmp_path / name)
        thread = disturb(tmp_path / name, ((0, signal.SIGKILL, 2),)) if place is not None else None
        run_to_end(tmp_path / name, experiment(algorithm, place))
        if thread is not None:
            thread.join(5)
    assert_same(tmp_path / "cluster", tmp_path / "one")
    assert [row["collector"] for row in events(tmp_path / "cluster", "started")] == [0, 1, 0]
    rows = numbers(tmp_path / "one")
    assert rows[0]["updates"] == 0 and rows[-1]["updates"] > 20
    start, end = (load_file(next((tmp_path / "one" / part).glob("*.safetensors"))) for part in ("start", "bundle"))
    assert any((start[name] != end[name]).any() for name in start)


@pytest.mark.slow
def test_the_critic_that_chooses_among_samples_travels_to_the_actors(tmp_path: Path, address: str) -> None:
    algorithm = replace(RLPD, entropy=None, warmup_noise=0.0, demonstration_share=0.0, best_of=BestOfConfig(samples=3))
    for name, place in (("one", None), ("cluster", cluster(address))):
        env = make_env(SIM)
        torch.manual_seed(0)
        policy = build_policy(CONFIGS["denoising"], RobotSpec.of(env.spec))
        env.close()
        save_bundle(policy, tmp_path / name / "start")
        run_to_end(tmp_path / name, experiment(algorithm, place))
    assert_same(tmp_path / "cluster", tmp_path / "one")
    assert numbers(tmp_path / "one")[-1]["updates"] > 20


@pytest.mark.slow
def test_asynchronous_rlpd_with_an_actor_killed_and_other_places_equals_one_process(
    tmp_path: Path, address: str
) -> None:
    """One process throughout; two actors, of which one is killed, then one process, then one actor. Warm-up with noise
    that was drawn before the interruption."""
    algorithm = replace(RLPD, staleness=2, demonstration_share=0.0, warmup=32)
    for name in ("one", "moved"):
        save_residual(tmp_path / name)
    run_to_end(tmp_path / "one", experiment(algorithm))
    thread = disturb(tmp_path / "moved", ((0, signal.SIGKILL, 1),))
    for iterations, place in ((2, cluster(address)), (4, None), (6, cluster(address, collectors=1))):
        run_to_end(tmp_path / "moved", experiment(replace(algorithm, iterations=iterations), place))
    thread.join(5)
    assert_same(tmp_path / "moved", tmp_path / "one")
    assert len(events(tmp_path / "moved", "lost")) == 1
    assert numbers(tmp_path / "one")[-1]["age_max"] == 8  # four updates for each of two chunks


@pytest.mark.slow
def test_asynchronous_runs_are_exact_through_termination_and_places(tmp_path: Path, address: str) -> None:
    """Terminated in the middle and resumed with another number of collectors, or in one process: as if nothing had
    happened."""
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
    run_to_end(tmp_path / "one", experiment(algorithm))
    assert_same(tmp_path / "one", whole)


# -- replacements that are lost too ---------------------------------------------------------------------------------


class DeadlyFolder(type(Path())):  # type: ignore[misc]
    """Kills the process that is sent this path, once for each file ``kill_*`` in the folder."""

    def __reduce__(self) -> tuple[Callable[[str], Path], tuple[str]]:
        return arrive, (str(self),)


def arrive(folder: str) -> Path:
    for order in Path(folder).glob("kill_*"):
        order.unlink()
        os.kill(os.getpid(), signal.SIGKILL)
    return Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("restarts", [3, 2])
def test_a_replacement_that_is_killed_while_it_starts_is_replaced_until_restarts(
    tmp_path: Path, address: str, restarts: int
) -> None:
    wanted = experiment(cluster=cluster(address, collectors=1, restarts=restarts))
    env = make_env(SIM)
    torch.manual_seed(0)
    save_bundle(build_policy(SMALL, RobotSpec.of(env.spec)), tmp_path / "start")
    env.close()
    with placed(tmp_path, wanted) as (learner, rollouts):
        rollouts.pool.settings = replace(rollouts.pool.settings, folder=DeadlyFolder(tmp_path))
        for i in range(2):
            (tmp_path / f"kill_{i}").touch()
        os.kill(events(tmp_path, "started")[0]["pid"], signal.SIGKILL)
        if restarts == 2:
            with pytest.raises(RunFailure, match=r"3 collectors were lost, more than cluster.restarts \(2\)"):
                learner.iterate()
        else:
            learner.iterate()
    assert len(events(tmp_path, "lost")) == 3
    assert len(events(tmp_path, "started")) == restarts - 1


# -- back-pressure ----------------------------------------------------------------------------------------------------


@contextmanager
def placed(folder: Path, wanted: Experiment) -> Iterator[tuple[Algorithm, ClusterRollouts]]:
    """The algorithm of a run in ``folder``, whose bundle is there, and its rollouts on the cluster."""
    from vla_rl.distributed.rollouts import ClusterRollouts

    run = open_run(wanted, folder, resume=False, command="vla-rl train small.yaml")
    env = make_env(wanted.sim)
    start = folder / "start"
    algorithm = load_algorithm(wanted, env, start, run.device, place_rollouts(run, start))
    rollouts = algorithm.collector
    assert isinstance(rollouts, ClusterRollouts)
    try:
        yield algorithm, rollouts
    finally:
        rollouts.close()
        env.close()
        run.lock.close()


def pending(rollouts: ClusterRollouts) -> list:
    """References to what was asked of collectors and not fetched."""
    return [ref for process in rollouts.pool._processes for ref in process.pending]


@pytest.mark.slow
def test_a_collector_that_is_faster_than_the_learner_waits(tmp_path: Path, address: str) -> None:
    """The learner takes the next rollout when the collectors have had the time for everything they may do: as many
    rollouts are complete as ``staleness`` allows, the collectors are idle, and memory does not grow."""
    import ray

    staleness, images = 2, replace(SIM, cameras=("agent",), image_size=(64, 64), num_envs=8)
    algorithm = replace(PPO, staleness=staleness, chunks=8, iterations=9)
    wanted = replace(experiment(algorithm, cluster(address, collectors=1)), sim=images)
    env = make_env(images)
    torch.manual_seed(0)
    save_bundle(build_policy(FLOW, RobotSpec.of(env.spec)), tmp_path / "start")
    env.close()
    used: list[float] = []
    with placed(tmp_path, wanted) as (learner, rollouts):
        (process,) = rollouts.pool._processes
        for _ in range(6):
            learner.iterate()
            refs = pending(rollouts)
            ready, late = ray.wait(refs, num_returns=len(refs), timeout=60, fetch_local=False)
            waiting = [*rollouts._answers.values(), *ray.get(ready)]
            assert (len(waiting), late) == (staleness * algorithm.rollout_shards, [])
            answers = {(answer.shard, answer.number): answer.state for answer in waiting}
            states = ray.get(process.actor.describe.remote())["states"]
            for shard, state in states.items():  # the collector stands where its last answer left it
                last = answers[shard, max(number for other, number in answers if other == shard)]
                assert (state["generator"] == last["generator"]).all()
                assert state["starts"]["next_index"] == last["starts"]["next_index"]
            del answers, waiting, last
            time.sleep(1.0)  # Ray counts its memory now and then
            total, free = ray.cluster_resources(), ray.available_resources()
            used.append(total["object_store_memory"] - free["object_store_memory"])
        one = sum(array.nbytes for array in PackedRecord.of(learner.collector.collect(8)).arrays)
    # Those that wait, the one that was learned from, and the weights, which are less than another one.
    assert max(used) < (staleness + 2) * one


@pytest.mark.slow
def test_a_state_has_the_weights_of_its_moment_without_a_copy_of_them_and_beyond_the_end_of_the_cluster(
    tmp_path: Path, address: str
) -> None:
    """Weights of 8 MB, which are learned from and published again after it."""
    save_residual(tmp_path)
    wanted = experiment(replace(RLPD, staleness=1, demonstration_share=0.0), cluster(address, collectors=1))
    given = {"weight": torch.randn(2_000_000)}
    expected = {"weight": given["weight"].clone()}
    with placed(tmp_path, wanted) as (_, rollouts):
        rollouts.publish(7, given)
        rollouts._ahead.append(Asked(version=7, chunks=1))
        weights = rollouts.state_dict()["weights"]
        assert not weights[7].arrays["weight"].flags.writeable, "a copy"
        given["weight"] += 1
        rollouts._ahead.clear()
        rollouts.publish(8, given)
    assert torch.equal(weights[7]["weight"], expected["weight"])


@pytest.mark.slow
def test_answers_are_taken_in_the_order_of_the_requests(tmp_path: Path, address: str) -> None:
    """Ray returns the small one first, from which a process that replaces a lost one must not go back."""
    import ray

    env = make_env(SIM)
    save_bundle(build_policy(SMALL, RobotSpec.of(env.spec)), tmp_path / "start")
    env.close()
    with placed(tmp_path, experiment(replace(PPO, staleness=1), cluster(address, collectors=1))) as (_, rollouts):
        for chunks in (500, 1):
            rollouts._submit(Asked(version=rollouts._version, chunks=chunks))
        refs = pending(rollouts)
        assert len(ray.wait(refs, num_returns=len(refs), timeout=60)[0]) == 4
        answers = [rollouts.pool.next_answer() for _ in refs]
        assert [(answer.number, answer.shard) for answer in answers] == [(0, 0), (0, 1), (1, 0), (1, 1)]
        assert rollouts.pool.states == {answer.shard: answer.state for answer in answers[2:]}


@pytest.mark.slow
def test_a_collector_waits_for_a_slower_one(tmp_path: Path, address: str) -> None:
    """One of two is stopped: the learner waits for it, and what the other has collected meanwhile stays bounded."""
    wanted = experiment(replace(RLPD, staleness=2, demonstration_share=0.0), cluster(address))
    save_residual(tmp_path)
    found: list[tuple[int, int]] = []
    with placed(tmp_path, wanted) as (learner, rollouts):
        learner.iterate()
        slow = rollouts.pool._processes[1].pid

        def look() -> None:
            while not any(shard == 0 for _, shard in rollouts._answers):
                time.sleep(0.01)
            time.sleep(2.0)
            found.append((len(pending(rollouts)), len(rollouts._answers)))
            os.kill(slow, signal.SIGCONT)

        os.kill(slow, signal.SIGSTOP)
        watcher = threading.Thread(target=look, daemon=True)
        watcher.start()
        learner.iterate()
        watcher.join(10)
    assert found == [(3, 3)], "those of the slow one under way, those of the fast one fetched"
