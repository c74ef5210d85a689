"""Signals to end, and the timeline."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sims.subproc.termination import Terminated, interruptible, terminable, uninterrupted
from tests.vla_rl.scale_run import PPO, experiment, numbers, run_to_end
from vla_rl.rollouts.timer import Span, Timer
from vla_rl.runs.metrics import read_metrics
from vla_rl.runs.timeline import Timeline


def send(number: signal.Signals = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0.01)


def at_once(done: list[str], number: signal.Signals = signal.SIGTERM) -> None:
    send(number)
    done.append("never")


def after_what_must_not_be_cut(done: list[str], number: signal.Signals = signal.SIGTERM) -> None:
    with uninterrupted():
        send(number)
        done.append("whole")
    done.append("never")


def inside_what_may_be_stopped(done: list[str], number: signal.Signals = signal.SIGTERM) -> None:
    with uninterrupted(), interruptible():
        send(number)
        done.append("never")


def before_what_may_be_stopped(done: list[str]) -> None:
    with uninterrupted():
        send()
        done.append("whole")
        with interruptible():
            done.append("never")


def again_before_it_has_ended(done: list[str]) -> None:
    with uninterrupted():
        send(signal.SIGINT)
        done.append("whole")
        send(signal.SIGINT)
        done.append("never")


@pytest.mark.parametrize(
    ("work", "expected"),
    [
        (at_once, []), (after_what_must_not_be_cut, ["whole"]), (inside_what_may_be_stopped, []),
        (before_what_may_be_stopped, ["whole"]),
    ],
)  # fmt: skip
def test_sigterm_stops(work: Callable[[list[str]], None], expected: list[str]) -> None:
    done: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated), terminable():
        work(done)
    assert done == expected
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_terminal_that_is_closed_stops_as_sigterm_does_unless_that_is_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with pytest.raises(Terminated), terminable():
            send(signal.SIGHUP)
        assert signal.signal(signal.SIGHUP, signal.SIG_IGN) == signal.SIG_DFL
        with terminable():
            send(signal.SIGHUP)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_run_that_is_terminated_between_two_iterations_is_saved(tmp_path: Path) -> None:
    with pytest.raises(Terminated):
        run_to_end(tmp_path, experiment(replace(PPO, iterations=3)), recorded=send)
    assert len(numbers(tmp_path)) == 1
    assert sorted(path.stem for path in (tmp_path / "checkpoints").glob("*.safetensors"))[-1] == "iteration_000001"


@pytest.mark.parametrize(
    ("work", "expected"),
    [(at_once, []), (after_what_must_not_be_cut, ["whole"]), (inside_what_may_be_stopped, [])],
)
def test_ctrl_c_stops_as_sigterm_does(
    work: Callable[..., None], expected: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    done: list[str] = []
    with pytest.raises(Terminated) as ended, terminable():
        work(done, signal.SIGINT)
    assert done == expected
    assert ended.value.exit_code == 130
    assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    waits = "Ctrl-C: ends where its state can be saved; Ctrl-C again: at once, without that\n"
    assert capfd.readouterr().err == waits * bool(expected)


def test_ctrl_c_again_stops_at_once() -> None:
    done: list[str] = []
    with pytest.raises(KeyboardInterrupt), terminable():
        again_before_it_has_ended(done)
    assert done == ["whole"]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("lines", "number", "code"),
    [(1, signal.SIGTERM, 143), (1, signal.SIGINT, 130), pytest.param(2, signal.SIGTERM, 143, marks=pytest.mark.slow)],
)
def test_a_terminated_run_is_saved_within_30_s_and_goes_on_exactly(
    tmp_path: Path, lines: int, number: signal.Signals, code: int
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    algorithm = replace(PPO, iterations=300)
    command = [sys.executable, "-m", "tests.vla_rl.scale_run", str(stopped), "none", "0", "300"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        while not (stopped / "metrics.jsonl").exists() or len(numbers(stopped)) < lines:
            time.sleep(0.002)
        asked = time.monotonic()
        process.send_signal(number)
        assert process.wait(60) == code
    assert time.monotonic() - asked < 30
    done = len(numbers(stopped))
    assert lines <= done < 300
    saved = max(int(path.stem.rpartition("_")[2]) for path in (stopped / "checkpoints").glob("*.safetensors"))
    assert saved - done in (0, 1), "the state of that moment: at most one iteration has yet to be validated"
    shorter = replace(algorithm, iterations=done + 3)
    run_to_end(stopped, experiment(shorter))
    run_to_end(whole, experiment(shorter))
    assert numbers(stopped) == numbers(whole)
    assert len(numbers(whole)) == done + 3


def test_the_timeline_is_a_chrome_trace_of_the_first_iterations(tmp_path: Path) -> None:
    timeline = Timeline(tmp_path / "trace.json", iterations=2)
    for iteration in range(3):
        began = 100.0 + iteration
        timeline.add(
            iteration,
            {
                "": [Span("learn", began, 0.25), Span("idle", began + 0.25, 0.5)],
                "collector 0": [Span("infer", began, 0.1)],
            },
        )
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [(event["name"], event["pid"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
    assert spans == [
        ("iteration 0", 0, 100e6, 0.75e6), ("learn", 1, 100e6, 0.25e6), ("idle", 1, 100.25e6, 0.5e6),
        ("infer", 2, 100e6, 0.1e6),
        ("iteration 1", 0, 101e6, 0.75e6), ("learn", 1, 101e6, 0.25e6), ("idle", 1, 101.25e6, 0.5e6),
        ("infer", 2, 101e6, 0.1e6),
    ]  # fmt: skip


def test_spans_cover_what_the_timer_counts() -> None:
    timer = Timer()
    timer.record(True)
    with timer.section("simulate"):
        time.sleep(0.02)
        with timer.section("render"):
            time.sleep(0.01)
    times, spans = timer.take(), timer.take_spans()[""]
    for name in ("simulate", "render"):
        assert sum(span.seconds for span in spans if span.name == name) == pytest.approx(times[f"time/{name}_s"])
    names = [span.name for span in spans]
    assert names in (["simulate", "render", "simulate"], ["simulate", "render"])
    assert timer.take_spans() == {}


def test_the_seconds_of_an_iteration_that_validates_include_its_rollout(tmp_path: Path) -> None:
    """As many as the spans of its timeline; the second iteration validates."""
    run_to_end(tmp_path, experiment(replace(PPO, iterations=2, rollout_shards=1)))
    seconds: list[dict[str, float]] = []
    for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]:
        if event["ph"] == "X" and event["name"].startswith("iteration "):
            seconds.append({})
        elif event["ph"] == "X":
            seconds[-1][event["name"]] = seconds[-1].get(event["name"], 0.0) + 1e-6 * event["dur"]
    records = read_metrics(tmp_path)
    assert ["time/validate_s" in record for record in records] == [False, True]
    for name in ("simulate", "infer", "learn"):
        assert records[1][f"time/{name}_s"] == pytest.approx(seconds[1][name], rel=1e-3)
