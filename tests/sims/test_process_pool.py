"""Worker processes: correct values, and recovery from failing workers."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sims.chunk import step_chunk
from sims.errors import UserError
from sims.subproc.fork_server_process import has_ended
from sims.subproc.vector_env import SubprocVectorEnv
from sims.subproc.worker_config import WorkerConfig
from sims.subproc.worker_group import SimulatorFailure
from sims.vector_env import StartState, decode_instructions
from sims.verification.conformance import WithoutAdvance
from tests.sims.counting import FAULT_SEED, Counting, CountingConfig

UP = torch.tensor([1.0, 0.0])
QUICK = WorkerConfig(step_timeout_s=3.0, max_failures_in_a_row=1)


@contextmanager
def pool(**settings: object) -> Iterator[SubprocVectorEnv]:
    opened = SubprocVectorEnv(CountingConfig(**settings), Counting)  # type: ignore[arg-type]
    try:
        yield opened
    finally:
        opened.close()


def starts(*seeds: int, task: int = 0) -> list[StartState]:
    return [StartState(task=task, seed=seed) for seed in seeds]


def first_position(seed: int) -> float:
    return float(np.random.default_rng(seed).uniform(0, 0.5))


class Interrupted(Exception):
    """Stands for KeyboardInterrupt, which would end the test run."""


def test_pool_continues_after_an_interrupted_step() -> None:
    def interrupt(number: int, frame: object) -> None:
        raise Interrupted

    previous = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pool(num_envs=2, step_s=0.3) as env:
            env.reset(start=starts(1, 2))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(Interrupted):
                env.step(UP.expand(2, 2))
            env.reset(start=starts(3, 4))  # ignores the answers to the interrupted step
            step = env.step(UP.expand(2, 2))
            assert step.reward.tolist() == pytest.approx([first_position(3) + 1, first_position(4) + 1])
            assert step.valid.all()
            assert not env.failures
    finally:
        signal.signal(signal.SIGALRM, previous)


def test_closing_again_leaves_the_files_of_others_open() -> None:
    """The numbers of its descriptors belong to whoever opened a file meanwhile."""
    with pool(num_envs=1) as env:
        env.reset(start=starts(1))
        env.close()
        others = [os.open(os.devnull, os.O_RDONLY) for _ in range(16)]
        try:
            env.close()
            assert [os.fstat(other).st_size for other in others] == [0] * len(others)
        finally:
            for other in others:
                os.close(other)


def test_numbers_of_an_episode() -> None:
    with pool(num_envs=2, max_steps=4, goal=3.0) as env:
        env.reset(start=[StartState(task=0, seed=1), StartState(task=1, seed=2)])
        up, down = first_position(1), first_position(2)
        for i in range(1, 4):
            step = env.step(UP.expand(2, 2))
            torch.testing.assert_close(step.reward, torch.tensor([up + i, down - i]))
        assert step.terminated.tolist() == [True, False]
        assert step.success.tolist() == [True, False]
        step = env.step(UP.expand(2, 2))
        assert step.reward[0] == 0.0
        assert step.terminated.tolist() == [True, False]
        assert step.truncated.tolist() == [False, True]
        obs = env.observe()
        assert obs.images[:, 0, 0, 0, 0].tolist() == [3, 4]  # the last state of each
        assert bytes(obs.instruction[1]).rstrip(b"\0") == b"go down"


def test_environments_are_finished_before_their_first_reset() -> None:
    with pool(num_envs=2) as env:
        env.reset([1], start=starts(3))
        assert env.step(UP.expand(2, 2)).truncated.tolist() == [True, False]


def test_chunk_equals_its_steps() -> None:
    action = torch.tensor([0.7, 0.0]).expand(3, 9, 2)
    with pool(num_envs=3, max_steps=8, goal=4.0) as env:
        env.reset(start=[StartState(task=i % 2, seed=i) for i in range(3)])
        whole = env.advance(action, 0.9)
        env.reset(start=[StartState(task=i % 2, seed=i) for i in range(3)])
        stepped = step_chunk(WithoutAdvance(env), action, 0.9)
    for name in ("reward", "num_executed", "terminated", "truncated", "success", "valid"):
        torch.testing.assert_close(getattr(whole, name), getattr(stepped, name))


def test_partial_reset_does_not_change_the_others() -> None:
    with pool(num_envs=3) as env:
        env.reset(start=starts(1, 2, 3))
        env.advance(UP.expand(3, 2, 2), 1.0)
        env.reset([1], start=starts(9))
        assert env.observe().state[:, 1].tolist() == [2, 0, 2]
        assert env.observe([1]).state[0, 2] == 9


def test_capture_and_restore() -> None:
    with pool(num_envs=2) as env:
        env.reset(start=starts(1, 2))
        env.advance(0.3 * UP.expand(2, 3, 2), 1.0)
        captured = env.capture([1])
        seen = env.observe([1])
        after = env.advance(UP.expand(2, 2, 2), 0.5)
        env.reset([0], start=captured)
        assert torch.equal(env.observe([0]).state, seen.state)
        env.reset([1], start=starts(5))
        again = env.advance(UP.expand(2, 2, 2), 0.5)
        assert again.reward[0] == after.reward[1]


def test_tasks_that_share_an_instruction_are_told_apart_and_policies_are_told_the_instruction() -> None:
    with pool(num_envs=2, instructions=("go", "go")) as env:
        env.reset(start=[StartState(task=0, seed=1), StartState(task=1, seed=1)])
        assert decode_instructions(env.observe().instruction) == ["go", "go"]
        assert env.spec.tasks == ("go up", "go down")


def test_expert_acts_in_each_environment() -> None:
    with pool(num_envs=2) as env:
        env.reset(start=[StartState(task=0, seed=0), StartState(task=1, seed=0)])
        assert env.expert(noise=0.0, seed=0).act()[:, 0].tolist() == [1.0, -1.0]
        noisy = env.expert(noise=0.1, seed=3)
        assert torch.equal(noisy.act(), env.expert(noise=0.1, seed=3).act())


@pytest.mark.parametrize(
    ("fault", "cause", "message"),
    [
        ("raise", "exit code 1", "the gripper fell off"),
        ("segfault", "SIGSEGV", "Fatal Python error: Segmentation fault"),
        ("exit", "exit code 3", ""),
        ("hang", "neither answered nor completed a step", "_fail"),
        ("stop", "stopped", ""),
    ],
)
def test_failed_worker_is_replaced(fault: str, cause: str, message: str) -> None:
    with pool(num_envs=2, fault=fault, workers=QUICK) as env:
        env.reset(start=starts(1, FAULT_SEED + 1))
        chunk = env.advance(UP.expand(2, 3, 2), 1.0)
        assert chunk.valid.tolist() == [True, False]
        assert chunk.truncated.tolist() == [False, True]
        assert chunk.num_executed.tolist() == [3, 0]
        assert chunk.reward[1] == 0
        (failure,) = env.failures
        assert (failure.env_id, failure.request) == (1, "advance")
        assert cause in failure.cause
        assert message in failure.stderr
        env.reset([1], start=starts(4))
        chunk = env.advance(UP.expand(2, 1, 2), 1.0)
        assert chunk.valid.all()
        assert env.observe().state[:, 1].tolist() == [4, 1]


def test_a_failed_environment_is_restored_as_failed() -> None:
    """Its actions so far would give an environment that goes on as if its worker had not failed."""
    with pool(num_envs=2, fault="raise", workers=QUICK) as env:
        env.reset(start=starts(1, FAULT_SEED + 2))
        env.advance(UP.expand(2, 3, 2), 1.0)
        failed, running = env.capture([1])[0], env.capture([0])[0]
        env.reset(start=[failed, running])
        restored = env.capture([0])[0]
        assert (restored.seed, restored.snapshot is not None and restored.snapshot.shape) == (failed.seed, (0, 0))
        assert env.observe().images.amax(dim=(1, 2, 3, 4)).tolist() == [0, 3]
        chunk = env.advance(UP.expand(2, 1, 2), 1.0)
        assert chunk.valid.tolist() == [False, True]
        assert chunk.truncated.tolist() == [True, False]
        assert chunk.num_executed.tolist() == [0, 1]
        env.reset([0], start=starts(4))
        assert env.advance(UP.expand(2, 1, 2), 1.0).valid.all()
        assert len(env.failures) == 1


def test_failing_observation_makes_the_chunk_invalid() -> None:
    with pool(num_envs=2, fault="observe", workers=QUICK) as env:
        env.reset(start=starts(1, FAULT_SEED + 2))
        assert env.advance(UP.expand(2, 1, 2), 1.0).valid.all()
        assert env.advance(UP.expand(2, 1, 2), 1.0).valid.tolist() == [True, False]
        assert env.observe().images[1].max() == 0


def test_observing_every_step_takes_one_exchange_per_step() -> None:
    """An observation that fails makes the step invalid if the workers observe with every step, otherwise not."""
    with pool(num_envs=1, fault="observe", goal=1e9, workers=QUICK) as env:
        env.reset(start=starts(FAULT_SEED + 3))
        for elapsed in (1, 2):
            assert env.step(UP[None]).valid.all()
            assert env.observe().state[0, 1] == elapsed
        assert not env.step(UP[None]).valid.any()
        env.observe()
        env.reset(start=starts(FAULT_SEED + 4))
        for _ in range(4):  # the workers observe with the first step, which is not needed
            assert env.step(UP[None]).valid.all()
        assert len(env.failures) == 1


def test_observations_that_are_kept_are_not_overwritten() -> None:
    """The first few observations are in shared memory; the others are copies."""
    with pool(num_envs=3, image_side=64) as env:
        env.reset(start=[StartState(task=0, seed=i) for i in range(3)])
        kept, lent = [], []
        for _ in range(8):
            env.step(torch.zeros(3, 2))
            kept.append(env.observe())
            lent.append(len(env._slots._lent))
        assert [int(seen.images.unique()) for seen in kept] == list(range(1, 9))  # every pixel shows the elapsed steps
        assert lent == [1, 2, 2, 2, 2, 2, 2, 2]
        again = env.observe()
        again.images.zero_()
        assert int(kept[-1].images.unique()) == int(env.observe().images.unique()) == 8
        kept.clear()
        del again
        assert not env._slots._lent


def test_finished_worker_may_wait_for_a_slow_one() -> None:
    """Waiting for the slow worker is not mistaken for a hanging worker that has answered already."""
    with pool(num_envs=2, goal=3.0, max_steps=250, step_s=0.02, workers=QUICK) as env:
        env.reset(start=[StartState(task=0, seed=1), StartState(task=1, seed=1)])
        chunk = env.advance(UP.expand(2, 250, 2), 1.0)
    assert chunk.num_executed.tolist() == [3, 250]
    assert chunk.valid.all()


def test_repeated_failures_stop_the_run() -> None:
    with pool(num_envs=1, fault="raise", workers=QUICK) as env:
        env.reset(start=starts(FAULT_SEED))
        assert not env.step(UP[None]).valid.any()
        env.reset(start=starts(FAULT_SEED))
        with pytest.raises(UserError, match=r"2 in a row[\s\S]*the gripper fell off"):
            env.step(UP[None])


def test_error_of_a_simulator_that_does_not_start() -> None:
    with pytest.raises(UserError, match="no such robot: R2D2"), pool(fault="construct"):
        pass


def test_chunk_of_single_steps_masks_a_failed_environment() -> None:
    with pool(num_envs=2, fault="raise", workers=QUICK) as env:
        env.reset(start=starts(1, FAULT_SEED + 2))
        chunk = step_chunk(WithoutAdvance(env), UP.expand(2, 4, 2), 1.0)
        assert chunk.valid.tolist() == [True, False]
        assert chunk.num_executed.tolist() == [4, 0]
        assert chunk.reward[1] == 0


def test_faults_at_random_times() -> None:
    """Two workers are killed, one is stopped, one raises: valid transitions are complete and happened exactly once."""
    rng = np.random.default_rng(0)
    num_envs, horizon = 8, 4
    config = CountingConfig(
        num_envs=num_envs,
        max_steps=200,
        goal=1e9,
        image_side=64,
        step_s=0.004,
        fault="raise",
        workers=replace(QUICK, max_failures_in_a_row=3),
    )
    env = SubprocVectorEnv(config, Counting)

    def disturb() -> None:
        pids = env.worker_pids
        for env_id, what in ((1, signal.SIGKILL), (5, signal.SIGKILL), (6, signal.SIGSTOP)):
            time.sleep(float(rng.uniform(0.05, 0.25)))
            os.kill(pids[env_id], what)

    try:
        seeds = iter(range(100))
        env.reset(start=starts(*[next(seeds) for _ in range(num_envs)]))
        env.reset([3], start=starts(FAULT_SEED + 9))
        trouble = threading.Thread(target=disturb)
        trouble.start()
        valid = invalid = 0
        obs = env.observe()
        for _ in range(40):
            action = torch.from_numpy(rng.uniform(-1, 1, (num_envs, horizon, 2)).astype(np.float32))
            chunk = env.advance(action, 1.0)
            shown = env.observe()
            ok = chunk.valid
            assert torch.equal(shown.state[ok, 1], obs.state[ok, 1] + chunk.num_executed[ok])
            assert torch.equal(shown.state[ok, 2], obs.state[ok, 2])  # of the same episode
            path = obs.state[:, :1] + action[:, :, 0].cumsum(1)
            torch.testing.assert_close(chunk.reward[ok], path.sum(1)[ok], rtol=1e-4, atol=1e-4)
            flat = shown.images[ok].flatten(1)
            assert (flat == shown.state[ok, 1:2].to(torch.uint8)).all()  # no image has pixels of two times
            assert (chunk.num_executed[~ok] == 0).all()
            valid, invalid = valid + int(ok.sum()), invalid + int((~ok).sum())
            ended = chunk.done.nonzero().flatten().tolist()
            if ended:
                env.reset(ended, start=starts(*[next(seeds) for _ in ended]))
            obs = env.observe()
        trouble.join()
        assert invalid == len(env.failures) == 4
        assert valid == 40 * num_envs - 4
        assert sorted(failure.env_id for failure in env.failures) == [1, 3, 5, 6]
        causes = {failure.env_id: failure.cause for failure in env.failures}
        assert "SIGKILL" in causes[1]
        assert "SIGKILL" in causes[5]
        assert "stopped" in causes[6]
    finally:
        env.close()


def test_modules_are_imported_before_the_fork() -> None:
    with pool(preload=("tests.sims.quiet_module",)) as env:
        assert env.spec.fingerprint["preloaded"] == "tests.sims.quiet_module"


def test_modules_that_start_threads_are_imported_in_each_worker() -> None:
    with pool(preload=("tests.sims.module_with_thread",)) as env:
        assert env.spec.fingerprint["preloaded"] == ""
        env.reset(start=starts(1))
        assert env.step(UP[None]).valid.all()


def test_a_simulator_that_hangs_while_it_is_loaded_is_named() -> None:
    for timeout_s in (6.0, 30.0, 100.0):  # the import of PyTorch comes first, and takes longest on a loaded machine
        config = CountingConfig(
            preload=("tests.sims.module_that_hangs",), workers=WorkerConfig(start_timeout_s=timeout_s)
        )
        with pytest.raises(SimulatorFailure, match=r"did not answer for .* s and was killed") as failure:
            SubprocVectorEnv(config, Counting)
        if "module_that_hangs.py" in str(failure.value):
            return
    pytest.fail(f"the stack trace does not name the module: {failure.value}")


def test_workers_are_forked_again_after_the_fork_server_was_killed() -> None:
    with pool(num_envs=2, workers=QUICK) as env:
        env.reset(start=starts(1, 2))
        os.kill(env.fork_server_pid, signal.SIGKILL)
        deadline = time.monotonic() + 60.0
        while not all(has_ended(pid) for pid in env.worker_pids):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not env.advance(UP.expand(2, 2, 2), 1.0).valid.any()
        assert all("SIGKILL" in failure.cause for failure in env.failures)
        env.reset(start=starts(1, 2))
        assert env.advance(UP.expand(2, 2, 2), 1.0).valid.all()


def test_standard_error_is_limited_in_size() -> None:
    with pool(stderr_bytes=1 << 20, workers=QUICK) as env:
        for seed in range(3):
            env.reset(start=starts(seed))
            env.advance(UP.expand(1, 4, 2), 1.0)
        env.reset(start=starts(4))
        (worker,) = env.worker_pids
        assert os.stat(f"/proc/{worker}/fd/2").st_size == 0


def test_close_ends_all_processes() -> None:
    env = SubprocVectorEnv(CountingConfig(num_envs=2), Counting)
    pids = [*env.worker_pids, env.fork_server_pid]
    env.close()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


def test_error_of_a_missing_interpreter() -> None:
    config = CountingConfig(workers=replace(QUICK, python=Path("/nowhere/python")))
    with pytest.raises(UserError, match="/nowhere/python"):
        SubprocVectorEnv(config, Counting)
