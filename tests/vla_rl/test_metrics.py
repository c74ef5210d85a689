from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch

from episodes.files import write_json
from sims.errors import UserError
from vla_rl.rollouts.timer import Timer
from vla_rl.runs.metrics import MetricsWriter, read_metrics


def write(run_dir: Path, iterations: range, *, tensorboard: bool = False) -> None:
    with MetricsWriter(run_dir, next_iteration=iterations.start, tensorboard=tensorboard) as metrics:
        for i in iterations:
            metrics.write(i, {"loss": 1 / (i + 1), "kl": torch.tensor(0.5 * i)})


def without_time(run_dir: Path) -> list[dict]:
    return [{key: value for key, value in row.items() if key != "wall_s"} for row in read_metrics(run_dir)]


def test_a_resumed_file_equals_an_uninterrupted_one(tmp_path: Path):
    write(tmp_path / "whole", range(8))
    write(tmp_path / "resumed", range(6))
    with (tmp_path / "resumed" / "metrics.jsonl").open("a") as file:
        file.write('{"iteration": 6, "los')
    write(tmp_path / "resumed", range(4, 8))
    assert without_time(tmp_path / "resumed") == without_time(tmp_path / "whole")
    times = [row["wall_s"] for row in read_metrics(tmp_path / "resumed")]
    assert times == sorted(times)


def test_a_new_run_starts_with_no_records(tmp_path: Path):
    assert read_metrics(tmp_path) == []
    write(tmp_path, range(3))
    write(tmp_path, range(2))
    assert [row["iteration"] for row in read_metrics(tmp_path)] == [0, 1]


@pytest.mark.parametrize("name", ["metrics.jsonl", "stages.json"])
def test_a_replaced_file_and_its_name_are_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    synced: list[tuple[bool, int]] = []
    sync = os.fsync

    def record(descriptor: int) -> None:
        status = os.fstat(descriptor)
        synced.append((stat.S_ISDIR(status.st_mode), status.st_ino))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", record)
    if name == "metrics.jsonl":
        MetricsWriter(tmp_path, tensorboard=False).close()
    else:
        write_json(tmp_path / name, {})
    assert synced == [(False, (tmp_path / name).stat().st_ino), (True, tmp_path.stat().st_ino)]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_values_that_are_not_finite_are_null(tmp_path: Path):
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        metrics.write(0, {"a": float("nan"), "b": float("inf"), "c": 0.1})
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    row = json.loads(line, parse_constant=pytest.fail)
    assert (row["a"], row["b"], row["c"]) == (None, None, 0.1)


def test_a_broken_line_in_the_middle_is_an_error(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text('{"iteration": 0, "wall_s": 0}\n{"iter\n{"iteration": 2, "wall_s": 0}\n')
    with pytest.raises(UserError, match="line 2 is not a JSON record"):
        read_metrics(tmp_path)


def test_tensorboard_reads_what_was_written(tmp_path: Path):
    write(tmp_path, range(3), tensorboard=True)
    time.sleep(1.1)  # TensorBoard reads event files in the order of their names, which hold whole seconds
    write(tmp_path, range(2, 4), tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [event.step for event in board.Scalars("loss")] == [0, 1, 2, 3]


WRITER = """
import sys; from pathlib import Path; from vla_rl.runs.metrics import MetricsWriter
metrics = MetricsWriter(Path(sys.argv[1]), tensorboard=False)
for i in range(10**9):
    metrics.write(i, {"loss": 0.5})
    print(i, flush=True)
"""


def test_kill_9_loses_no_written_record(tmp_path: Path):
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for _ in range(50):
            last = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
    rows = read_metrics(tmp_path)
    assert [row["iteration"] for row in rows[: last + 1]] == list(range(last + 1))


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def advance(self, seconds: float) -> None:
        self.now += seconds


def test_nested_sections_sum_to_the_elapsed_time(monkeypatch: pytest.MonkeyPatch):
    clock, timer = Clock(monkeypatch), Timer()
    with timer.section("simulate"):
        clock.advance(2.0)
        with timer.section("render"):
            clock.advance(4.0)
        clock.advance(1.0)
    clock.advance(8.0)
    assert timer.take() == {"time/simulate_s": 3.0, "time/render_s": 4.0}
    assert timer.take() == {}


def test_a_section_that_raises_is_closed(monkeypatch: pytest.MonkeyPatch):
    clock, timer = Clock(monkeypatch), Timer()
    with pytest.raises(KeyError), timer.section("learn"):
        raise KeyError
    timer.take()
    clock.advance(5.0)
    assert timer.take() == {}


def test_weights_and_biases_gets_the_metrics_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Offline: its run lies in the folder. Without it the message says what to do."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    if find_spec("wandb") is None:
        with pytest.raises(UserError, match="pip install wandb"):
            MetricsWriter(tmp_path, tensorboard=False, wandb="project")
        return
    with MetricsWriter(tmp_path, tensorboard=False, wandb="project") as metrics:
        metrics.write(0, {"kl": 0.125})
    (logged,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    assert b"0.125" in logged.read_bytes()


def test_folders_of_one_name_are_runs_of_their_own_in_weights_and_biases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for the package, which is not installed everywhere, records what it is asked for."""
    asked: list[tuple[str, str]] = []

    class Run:
        def finish(self) -> None: ...

    def init(*, name: str, id: str, **_: object) -> Run:
        asked.append((name, id))
        return Run()

    package = ModuleType("wandb")
    package.__spec__ = ModuleSpec("wandb", None)
    monkeypatch.setattr(package, "init", init, raising=False)
    monkeypatch.setitem(sys.modules, "wandb", package)
    trials = [tmp_path / f"trial_{number}" / "seed_0" for number in (0, 1)]
    for folder in (*trials, trials[0]):
        MetricsWriter(folder, tensorboard=False, wandb="project").close()
    first, second, again = asked
    assert first[1] != second[1] and first[0] != second[0]
    assert again == first
