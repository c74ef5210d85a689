"""A failed worker is in the log and the report of its run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from sims.devices.env_on_device import EnvOnDevice
from sims.errors import UserError
from sims.subproc.vector_env import SubprocVectorEnv
from sims.subproc.worker_config import WorkerConfig
from sims.vector_env import StartState
from tests.sims.counting import FAULT_SEED, Counting, CountingConfig
from tests.worlds import ChainEnv
from vla_rl.report import write_report
from vla_rl.runs.failures import FailureLog, read_failures


def test_failure_is_logged_once_and_in_the_report(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    env = SubprocVectorEnv(CountingConfig(num_envs=2, fault="raise", workers=WorkerConfig()), Counting)
    log = FailureLog(tmp_path, EnvOnDevice(env, torch.device("cpu")))  # what is around an environment passes them on
    try:
        assert log.write("imitation") == 0
        env.reset(start=[StartState(task=0, seed=1), StartState(task=0, seed=FAULT_SEED)])
        env.step(torch.ones(2, 2))
        assert [log.write("iteration 3"), log.write("at the end")] == [1, 0]
    finally:
        env.close()
    (found,) = read_failures(tmp_path)
    assert (found["stage"], found["env_id"], found["request"]) == ("iteration 3", 1, "advance")
    assert "the gripper fell off" in found["stderr"]

    page = write_report(tmp_path).read_text()
    for words in (
        "Worker failures",
        "iteration 3",
        "exit code 1",
        "the gripper fell off",
        "1 simulator process failed",
    ):
        assert words in page


def test_incomplete_last_line_is_ignored(tmp_path: Path) -> None:
    record = {"stage": "x", "env_id": 0, "pid": 1, "request": "observe", "cause": "y", "stderr": ""}
    (tmp_path / "failures.jsonl").write_text(json.dumps(record) + '\n{"stage": "it')
    assert read_failures(tmp_path) == [record]


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    (tmp_path / "failures.jsonl").write_text('{"stage": "it\n')
    with pytest.raises(UserError, match=r"failures.jsonl: line 1 is not a JSON record"):
        write_report(tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"env_id": None}, "env_id is None"), ({"request": 3}, "request is 3"), ({"stage": "x"}, None)],
)
def test_a_line_without_what_the_report_shows_is_named(
    tmp_path: Path, change: dict[str, object], said: str | None
) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    record = {"stage": "x", "env_id": 0, "pid": 1, "request": "observe", "cause": "y", "stderr": ""}
    (tmp_path / "failures.jsonl").write_text(f"{json.dumps(record)}\n{json.dumps(record | change)}\n")
    if said is None:
        write_report(tmp_path)
        return
    with pytest.raises(UserError, match=rf"failures\.jsonl: line 2 is no failure \({said}\), repair or delete it"):
        write_report(tmp_path)
    del record["env_id"]
    (tmp_path / "failures.jsonl").write_text(f"{json.dumps(record)}\n")
    with pytest.raises(UserError, match=r"failures\.jsonl: line 1 is no failure \(env_id is None\)"):
        write_report(tmp_path)


def test_environments_that_cannot_fail_have_no_log(tmp_path: Path) -> None:
    assert FailureLog(tmp_path, ChainEnv(num_envs=1)).write("imitation") == 0
    assert not (tmp_path / "failures.jsonl").exists()
