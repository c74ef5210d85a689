"""The robot's recorder: real processes, a real store, every way to end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from episodes.schema import HUMAN, POLICY, EpisodeError
from episodes.store import EpisodeStore
from real_robot.recorder import MAX_QUEUED, MAX_STEPS, EpisodeBuilder, Recorder

HEAD = {"task": "pick", "seed": 5, "control_hz": 20.0, "policy_version": "abc", "fingerprint": {"robot": "fake"}}


def drive(recorder: Recorder, steps: int = 6, action_delay: int = 0) -> None:
    recorder.begin(instruction="pick up the red block", action_delay=action_delay, **HEAD)
    for i in range(steps):
        if i % 4 == 0:
            recorder.observation(i, {"agent": np.full((4, 6, 3), i, np.uint8)}, np.full(3, i, np.float32))
        recorder.action(np.full(2, 0.1 * i, np.float32), HUMAN if i == 3 else POLICY)


def test_an_episode_holds_its_observations_and_actions(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    drive(recorder)
    recorder.observation(4, {"agent": np.full((4, 6, 3), 99, np.uint8)}, np.full(3, 99, np.float32))  # observed again
    recorder.end(success=True)
    drive(recorder, steps=2, action_delay=3)
    recorder.end(success=False)
    recorder.close()
    recorder.join(timeout_s=60)
    assert (recorder.recorded, recorder.problem) == (2, "")
    store = EpisodeStore(tmp_path)
    first, second = (store.read(entry.id) for entry in store.select())
    assert first.observation_steps.tolist() == [0, 4]
    assert [int(frame[0, 0, 0]) for frame in first.images["agent"]] == [0, 99]
    np.testing.assert_allclose(first.action[:, 0], 0.1 * np.arange(6), atol=1e-6)
    assert first.actor.tolist() == [POLICY, POLICY, POLICY, HUMAN, POLICY, POLICY]
    assert first.success.tolist() == [False] * 5 + [True]
    assert (first.terminated[-1], first.truncated[-1], first.reward.sum()) == (True, False, 1.0)
    assert (second.terminated[-1], second.truncated[-1], second.success.any()) == (False, True, False)
    assert (first.policy_version, first.seed, first.instruction) == ("abc", 5, "pick up the red block")
    assert (first.action_delay, second.action_delay) == (0, 3)


def test_nothing_is_recorded_outside_an_episode_or_without_an_observation(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.action(np.zeros(2, np.float32), POLICY)
    recorder.begin(instruction="x", **HEAD)
    recorder.action(np.zeros(2, np.float32), POLICY)
    recorder.end(success=True)
    recorder.close()
    recorder.join(timeout_s=60)
    assert recorder.recorded == 0
    assert "is not recorded" in recorder.problem
    assert EpisodeStore(tmp_path).select() == []


def test_a_killed_recorder_loses_one_episode_and_is_restarted(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    drive(recorder)
    wait_for(lambda: recorder._process is not None)
    assert recorder._process is not None
    recorder._process.kill()
    recorder.end(success=True)
    wait_for(lambda: recorder.problem.startswith("the recorder's process ended"))
    drive(recorder)
    recorder.end(success=True)
    recorder.close()
    recorder.join(timeout_s=60)
    assert (recorder.recorded, recorder.problem) == (1, "")
    assert len(EpisodeStore(tmp_path).select()) == 1


def test_an_invalid_entry_in_the_pipe_ends_the_recorder_process(tmp_path: Path) -> None:
    EpisodeStore(tmp_path, create=True).close()
    command = [sys.executable, "-m", "real_robot.recorder", str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(b"\x03\x00\x00\x00\xc1\xc1\xc1")
        process.stdin.flush()
        process.wait(timeout=60)  # while its pipe stays open


def test_the_episode_of_a_killed_node_is_committed_as_truncated(tmp_path: Path) -> None:
    """Also after the end of an episode whose commit was not awaited."""
    program = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from real_robot.recorder import MAX_STEPS, EpisodeBuilder, Recorder
        from tests.real_robot.test_robot_recorder import drive
        recorder = Recorder(Path(sys.argv[1]))
        drive(recorder)
        recorder.end(success=True)
        drive(recorder)
        while recorder._queue.qsize():
            time.sleep(0.01)
        print("driving", flush=True)
        time.sleep(60)
    """)
    node = subprocess.Popen([sys.executable, "-c", program, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert node.stdout is not None
    assert node.stdout.readline() == "driving\n"
    node.send_signal(signal.SIGKILL)
    node.wait()
    node.stdout.close()
    wait_for(lambda: len(EpisodeStore(tmp_path).select()) == 2)
    whole, episode = (EpisodeStore(tmp_path).read(entry.id) for entry in EpisodeStore(tmp_path).select())
    assert whole.succeeded
    assert episode.num_steps >= 5
    assert episode.truncated[-1]
    assert not episode.succeeded


def test_closing_returns_at_once_although_the_disk_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("real_robot.recorder.MAX_QUEUED", 400)
    recorder = Recorder(tmp_path)
    assert recorder._process is not None
    recorder._process.send_signal(signal.SIGSTOP)
    recorder.begin(instruction="x", **HEAD)
    image = {"agent": np.zeros((400, 400, 3), np.uint8)}
    for i in range(500):  # more than the queue holds
        recorder.observation(i, image, np.zeros(3, np.float32))
    assert "too slow" in recorder.problem
    began = time.monotonic()
    recorder.close()
    assert not recorder.join(timeout_s=0.1)
    assert time.monotonic() - began < 1.0
    recorder._process.send_signal(signal.SIGCONT)
    assert recorder.join(timeout_s=60)


def test_a_disk_that_hangs_does_not_keep_the_program_from_ending(tmp_path: Path) -> None:
    program = textwrap.dedent("""
        import functools, signal, sys
        from pathlib import Path
        from real_robot.recorder import Recorder
        recorder = Recorder(Path(sys.argv[1]))
        recorder._process.send_signal(signal.SIGSTOP)
        print(recorder._process.pid, flush=True)
        recorder.join = functools.partial(recorder.join, 0.5)
        recorder.close()
    """)
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout is not None
        stopped = int(node.stdout.readline())
        try:
            assert node.wait(timeout=20) == 0
        finally:
            node.kill()
            os.kill(stopped, signal.SIGCONT)


def test_a_long_episode_is_recorded_in_parts_that_follow_each_other() -> None:
    """So that the memory of the recorder does not grow with the episode."""
    head = {"instruction": "x", "source": "policy", "action_delay": 0, **HEAD}
    builder, parts = EpisodeBuilder(head), []
    for step in range(2 * MAX_STEPS + 100):
        if step % 4 == 0:
            builder.add({"kind": "observation", "step": step, "images": {"agent": np.zeros((2, 2, 3), np.uint8)},
                         "state": np.full(3, step, np.float32)})  # fmt: skip
        builder.add({"kind": "action", "action": np.full(2, (step % 100) / 100, np.float32), "actor": POLICY})
        if (part := builder.continued()) is not None:
            parts.append(builder.build(success=False))
            builder = part
    parts.append(builder.build(success=True))
    assert [part.num_steps for part in parts] == [MAX_STEPS, MAX_STEPS, 100]
    for before, after in pairwise(parts):
        assert before.observation_steps[-1] == before.num_steps
        assert after.observation_steps[0] == 0
        assert (before.state[-1] == after.state[0]).all()
    assert parts[0].truncated[-1]
    assert parts[-1].succeeded


def test_what_was_observed_for_later_steps_goes_into_the_next_part() -> None:
    """As of a policy that acts three control steps after its observations."""
    builder, parts = EpisodeBuilder({"instruction": "x", "source": "policy", "action_delay": 3, **HEAD}), []
    for step in range(MAX_STEPS + 100):
        for seen in range(4) if step == 0 else (step + 3,):
            builder.add({"kind": "observation", "step": seen, "images": {"agent": np.zeros((2, 2, 3), np.uint8)},
                         "state": np.full(3, seen, np.float32)})  # fmt: skip
        builder.add({"kind": "action", "action": np.zeros(2, np.float32), "actor": POLICY})
        if (part := builder.continued()) is not None:
            parts.append(builder.build(success=False))
            builder = part
    parts.append(builder.build(success=True))
    for part, first in zip(parts, (0, MAX_STEPS), strict=True):
        assert part.observation_steps.tolist() == list(range(part.num_steps + 1))
        assert part.state[:, 0].tolist() == list(range(first, first + part.num_steps + 1))


def test_a_part_that_is_not_recorded_is_named_at_the_end_of_the_episode(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.begin(instruction="x", **HEAD)
    for step in range(MAX_STEPS + 100):
        if step % 4 == 2:  # none before the first action
            recorder.observation(step, {"agent": np.zeros((2, 2, 3), np.uint8)}, np.zeros(3, np.float32))
        recorder.action(np.zeros(2, np.float32), POLICY)
        wait_for(lambda: recorder._queue.qsize() < MAX_QUEUED - 10)
    recorder.end(success=True)
    recorder.close()
    assert recorder.join(timeout_s=60)
    assert "is not recorded" in recorder.problem
    assert recorder.recorded == 0
    (rest,) = EpisodeStore(tmp_path).select()
    assert EpisodeStore(tmp_path).read(rest.id).num_steps == 98


def test_an_episode_that_another_one_follows_without_an_end_is_answered(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.begin(instruction="x", **HEAD)
    recorder.action(np.zeros(2, np.float32), POLICY)
    drive(recorder)
    wait_for(lambda: "is not recorded" in recorder.problem)
    drive(recorder)
    wait_for(lambda: "it is recorded as truncated" in recorder.problem)
    recorder.end(success=True)
    wait_for(lambda: recorder.recorded == 1)
    assert recorder.problem == ""
    recorder.close()
    assert recorder.join(timeout_s=60)
    assert len(EpisodeStore(tmp_path).select()) == 2


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_unusable_store_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, EpisodeError), match="file"):
        Recorder(tmp_path / "file")
