"""One update in several processes: the same numbers as in one, a lost process ends the run."""

import multiprocessing
import os
import signal
import threading
import time
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.numpy import load_file

from sims.errors import RunFailure
from tests.vla_rl.scale_run import FLOW, GRPO, PPO, experiment, numbers, run_to_end
from vla_rl.algorithms.off_policy_settings import OffPolicyConfig
from vla_rl.config.cluster import ClusterConfig
from vla_rl.distributed.processes import LearnerProcesses, join
from vla_rl.runners.replay import replay
from vla_rl.runs.checkpoint import latest_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")

# Three micro-batches of a minibatch: two learners do not both have one all the time.
OF_THREE = replace(PPO, update=replace(PPO.update, minibatch=9, micro_batch=3))


SHORT = replace(OF_THREE, iterations=5)


def learners(count: int, sharding: Literal["none", "fsdp"] = "none") -> ClusterConfig:
    return ClusterConfig(collectors=0, learners=count, sharding=sharding)


def assert_same(folder: Path, expected: Path) -> None:
    assert numbers(folder) == numbers(expected)
    bundles = [load_file(next((one / "bundle").glob("*.safetensors"))) for one in (folder, expected)]
    assert all((bundles[0][name] == bundles[1][name]).all() for name in bundles[1])


@pytest.mark.slow
def test_one_two_and_again_one_learner_continue_exactly(tmp_path: Path) -> None:
    run_to_end(tmp_path / "one", experiment(OF_THREE))
    for count, iterations in ((1, 2), (2, 4), (1, 6)):
        wanted = experiment(replace(OF_THREE, iterations=iterations), learners(count))
        run_to_end(tmp_path / "moved", wanted)
    assert_same(tmp_path / "moved", tmp_path / "one")
    assert all(row["kl"] > 0 for row in numbers(tmp_path / "one")[2:])


@pytest.mark.slow
def test_grpo_of_two_learners_equals_one(tmp_path: Path) -> None:
    algorithm = replace(GRPO, update=replace(GRPO.update, micro_batch=2))
    run_to_end(tmp_path / "one", experiment(algorithm))
    run_to_end(tmp_path / "two", experiment(algorithm, learners(2)))
    assert_same(tmp_path / "two", tmp_path / "one")


@pytest.mark.slow
def test_divided_weights_continue_on_one_two_three_and_again_one_learner(tmp_path: Path) -> None:
    run_to_end(tmp_path / "one", experiment(SHORT), FLOW)
    for count, iterations in ((1, 2), (2, 3), (3, 4), (1, 5)):
        wanted = experiment(replace(SHORT, iterations=iterations), learners(count, "fsdp" if count > 1 else "none"))
        run_to_end(tmp_path / "moved", wanted, FLOW)
        latest = latest_checkpoint(tmp_path / "moved/checkpoints")
        assert latest is not None
        parts = list(latest.parent.glob(f"{latest.name}.*.parts/part_*.safetensors"))
        assert len(parts) == (count if count > 1 else 0)
    assert_same(tmp_path / "moved", tmp_path / "one")


@pytest.mark.slow
def test_divided_weights_that_are_resumed_equal_those_that_went_on_bit_for_bit(tmp_path: Path) -> None:
    run_to_end(tmp_path / "whole", experiment(SHORT, learners(2, "fsdp")), FLOW)
    for iterations in (3, 5):
        wanted = experiment(replace(SHORT, iterations=iterations), learners(2, "fsdp"))
        run_to_end(tmp_path / "resumed", wanted, FLOW)
    assert_same(tmp_path / "resumed", tmp_path / "whole")


@pytest.mark.slow
def test_a_divided_update_that_explodes_is_kept_in_parts_and_can_be_repeated(tmp_path: Path) -> None:
    """Both learners stop at the same minibatch, and each writes what it has."""
    exploding = replace(SHORT, update=replace(SHORT.update, learning_rate=1e25))
    with pytest.raises(RunFailure, match=r"iteration 1: .* the last finite checkpoint is .*iteration_000000"):
        run_to_end(tmp_path, experiment(exploding, learners(2, "fsdp")), FLOW)
    assert not multiprocessing.active_children()
    (kept,) = (tmp_path / "quarantine").glob("*.safetensors")
    assert len(list((tmp_path / "quarantine").glob(f"{kept.name}.*.parts/part_*"))) == 2
    assert replay(kept)["reproduced"]


@pytest.mark.slow
def test_a_learner_that_is_killed_ends_the_run_which_resumes_exactly(tmp_path: Path) -> None:
    run_to_end(tmp_path / "whole", experiment(OF_THREE))

    def kill() -> None:
        while not (tmp_path / "killed/metrics.jsonl").exists() or len(numbers(tmp_path / "killed")) < 2:
            time.sleep(0.005)
        (learner,) = multiprocessing.active_children()
        assert learner.pid is not None
        os.kill(learner.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    with pytest.raises(RunFailure, match=r"learner 1 .* ended with exit code -9 .*--resume"):
        run_to_end(tmp_path / "killed", experiment(OF_THREE, learners(2)))
    thread.join(5)
    assert not multiprocessing.active_children()
    assert 2 <= len(numbers(tmp_path / "killed")) < 6
    run_to_end(tmp_path / "killed", experiment(OF_THREE, learners(2)))
    assert_same(tmp_path / "killed", tmp_path / "whole")


def listen_until_stopped(
    pipe: Connection, rank: int, size: int, store: Path, hang_s: float, threads: int
) -> None:  # pragma: no cover - in another process
    """Reads one batch, then nothing."""
    pipe.send_bytes(b"ready")
    join(torch.device("cpu"), rank, size, store, hang_s)
    pipe.recv()
    pipe.recv_bytes()
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.slow
def test_a_learner_that_hangs_while_a_batch_is_sent_to_it_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is larger than the buffer of the pipe."""
    monkeypatch.setattr("vla_rl.distributed.processes.END_S", 0.5)
    config = ClusterConfig(collectors=0, learners=2, hang_s=2.0)
    processes = LearnerProcesses(listen_until_stopped, config, torch.device("cpu"))
    try:
        processes.tell("run", bytes(10_000_000))
        began = time.monotonic()
        with pytest.raises(RunFailure, match=r"did not answer within 2 s \(cluster.hang_s\): processes \d+"):
            processes.tell("run", bytes(10_000_000))
        assert 2 <= time.monotonic() - began < 30
    finally:
        processes.close()
    assert not multiprocessing.active_children()


def test_learners_that_would_have_nothing_to_do_are_refused() -> None:
    with pytest.raises(ValueError, match=r"at most the micro-batches of a minibatch, which they share \(1\), got 2"):
        experiment(PPO, learners(2))
    with pytest.raises(ValueError, match=r"sharding fsdp divides weights between learners: set cluster\.learners"):
        learners(1, "fsdp")
    with pytest.raises(ValueError, match="reference_weight 0"):
        experiment(replace(OF_THREE, update=replace(OF_THREE.update, reference_weight=0.1)), learners(2))
    with pytest.raises(ValueError, match="off_policy learns in one process"):
        experiment(OffPolicyConfig(), learners(2))
