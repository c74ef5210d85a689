"""Whole runs through the command line: killed and resumed, they end exactly as if nothing had happened."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.vla_rl.command import vla_rl
from vla_rl.runs.metrics import read_metrics
from vla_rl.runs.run_dir import stage_seconds

TINY = Path(__file__).parents[1] / "data" / "tiny.yaml"
GRPO = ["--algorithm.name", "grpo", "--algorithm.iterations", "6", "--algorithm.groups", "2",
        "--algorithm.group_size", "2", "--algorithm.min_success", "0", "--algorithm.max_success", "1"]  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def command(run_dir: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "vla_rl.cli", "train", str(TINY), "--run-dir", str(run_dir), *more]


def in_process(run_dir: Path, *more: str) -> None:
    done = vla_rl("train", TINY, "--run-dir", run_dir, *more)
    assert done.returncode == 0, done.stderr


def numbers(run_dir: Path) -> list[dict[str, float]]:
    """Metrics without what depends on the clock."""
    return [
        {name: value for name, value in record.items() if name != "wall_s" and not name.startswith("time/")}
        for record in read_metrics(run_dir)
    ]


def kill_when(process: subprocess.Popen, run_dir: Path, lines: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and process.poll() is None:
        if (run_dir / "metrics.jsonl").exists() and len(read_metrics(run_dir)) >= lines:
            os.kill(process.pid, signal.SIGKILL)
            break
        time.sleep(0.005)
    assert process.wait(60) == -signal.SIGKILL


@pytest.fixture(scope="module")
def whole(one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    in_process(folder)
    return folder


def test_a_killed_run_resumes_bit_for_bit(whole: Path, tmp_path: Path) -> None:
    kill_and_resume(whole, tmp_path / "killed")


@pytest.mark.slow
def test_a_killed_run_of_grpo_resumes_bit_for_bit(tmp_path: Path) -> None:
    in_process(tmp_path / "whole", *GRPO)
    kill_and_resume(tmp_path / "whole", tmp_path / "killed", *GRPO)


def kill_and_resume(whole: Path, killed: Path, *extra: str) -> None:
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command(killed, *extra), env=one_thread) as process:
        kill_when(process, killed, lines=3)
    subprocess.run(command(killed, *extra, "--resume"), check=True, env=one_thread)

    assert numbers(killed) == numbers(whole)
    assert len(numbers(whole)) == 6
    weights, expected = (load_file(next((run / "bundle").glob("*.safetensors"))) for run in (killed, whole))
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (weights[name] == tensor).all(), name
    results = [json.loads((run / "result.json").read_text()) for run in (killed, whole)]
    for name in ("bc", "rl", "stochastic"):
        assert results[0][name] == results[1][name]
    assert results[0]["wall_s"]["rl"] >= round(read_metrics(killed)[-1]["wall_s"], 2)  # not since it was resumed
    assert (killed / "report.html").stat().st_size > 1000


def test_a_run_resumed_after_its_demonstrations_counts_their_time_once(whole: Path, tmp_path: Path) -> None:
    resumed = tmp_path / "resumed"
    shutil.copytree(whole / "demonstrations", resumed / "demonstrations")
    for name in ("config.yaml", "command.txt", "device.txt"):
        shutil.copy(whole / name, resumed / name)
    demonstrated = json.loads((whole / "stages.json").read_text())["demonstrate"] | {"wall_s": 10_000.0}
    (resumed / "stages.json").write_text(json.dumps({"demonstrate": demonstrated}))
    in_process(resumed, "--resume")

    taken = json.loads((resumed / "result.json").read_text())["wall_s"]
    assert taken["collect"] == 10_000.0
    assert 0 < taken["bc"] < 1_000
    assert stage_seconds(resumed, "imitate") == pytest.approx(taken["collect"] + taken["bc"])  # what a sweep counts


def test_an_interrupted_run_says_how_to_go_on(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with subprocess.Popen(command(run_dir), stderr=subprocess.PIPE, text=True) as process:
        while process.poll() is None and not (run_dir / "metrics.jsonl").exists():
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        message = process.stderr.read()
    assert process.returncode == 130
    assert "--resume" in message


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        (
            "--start.policy",
            "{name: diffusion_policy, crop: 48, convention: {cameras: [nope]}}",
            "policy.convention.cameras: the robot has no camera 'nope'; it has agent, wrist",
        ),
        ("--sim.image_size", "[1, 1]", "the images (sim.image_size) are 1x1 pixels"),
    ],
)
def test_settings_that_do_not_fit_the_robot_are_refused_before_there_is_a_folder(
    tmp_path: Path, setting: str, value: str, message: str
) -> None:
    refused = vla_rl("train", TINY, "--run-dir", tmp_path / "run", setting, value)
    assert refused.returncode == 2, refused.stderr
    assert message in refused.stderr
    assert not (tmp_path / "run").exists()


def test_a_folder_with_a_run_is_not_overwritten(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text(TINY.read_text())
    refused = vla_rl("train", TINY, "--run-dir", run_dir)
    assert refused.returncode == 2
    assert "--resume" in refused.stderr
    other = vla_rl("train", TINY, "--run-dir", run_dir, "--resume", "--seed", "9")
    assert other.returncode == 2
    assert "other settings" in other.stderr
    assert other.stderr.count("\n") == 1
