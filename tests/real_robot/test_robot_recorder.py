"""The robot's recorder: real processes, a real store, every way to end."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

from episodes.schema import EpisodeError
from episodes.store import EpisodeStore
from real_robot.recorder import Recorder

HEAD = {"task": "pick", "seed": 5, "control_hz": 20.0, "policy_version": "abc", "fingerprint": {"robot": "fake"}}


def drive(recorder: Recorder, steps: int = 6) -> None:
    recorder.begin(instruction="pick up the red block", **HEAD)
    for i in range(steps):
        if i % 4 == 0:
            recorder.observation(i, {"agent": np.full((4, 6, 3), i, np.uint8)}, np.full(3, i, np.float32))
        recorder.action(np.full(2, 0.1 * i, np.float32))


def test_an_episode_holds_its_observations_and_actions(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    drive(recorder)
    recorder.observation(4, {"agent": np.full((4, 6, 3), 99, np.uint8)}, np.full(3, 99, np.float32))  # observed again
    recorder.end(success=True)
    drive(recorder, steps=2)
    recorder.end(success=False)
    recorder.close()
    recorder.join()
    assert (recorder.recorded, recorder.problem) == (2, "")
    store = EpisodeStore(tmp_path)
    first, second = (store.read(entry.id) for entry in store.select())
    assert first.observation_steps.tolist() == [0, 4]
    assert [int(frame[0, 0, 0]) for frame in first.images["agent"]] == [0, 99]
    np.testing.assert_allclose(first.action[:, 0], 0.1 * np.arange(6), atol=1e-6)
    assert first.success.tolist() == [False] * 5 + [True]
    assert (first.terminated[-1], first.truncated[-1], first.reward.sum()) == (True, False, 1.0)
    assert (second.terminated[-1], second.truncated[-1], second.success.any()) == (False, True, False)
    assert (first.policy_version, first.seed, first.instruction) == ("abc", 5, "pick up the red block")


def test_nothing_is_recorded_outside_an_episode_or_without_an_observation(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.action(np.zeros(2, np.float32))
    recorder.begin(instruction="x", **HEAD)
    recorder.action(np.zeros(2, np.float32))
    recorder.end(success=True)
    recorder.close()
    recorder.join()
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
    recorder.join()
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
        from real_robot.recorder import Recorder
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


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_unusable_store_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises((OSError, EpisodeError), match="file"):
        Recorder(tmp_path / "file")
