"""Every stage of a run that hangs is named, with what it is doing."""

import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch import Tensor

import vla_rl.runners.train
from sims.env_wrapper import EnvWrapper
from sims.vector_env import DemonstratedEnv, Expert, Step, VectorEnv
from tests.vla_rl.scale_run import PPO, SIM, SMALL
from vla_rl.algorithms.bc import BCConfig
from vla_rl.config.environments import make_env
from vla_rl.config.experiment import EvaluationConfig, Experiment, Imitation
from vla_rl.heartbeat import beat
from vla_rl.rollouts.timer import Timer
from vla_rl.runs.run_dir import read_stages
from vla_rl.runs.watchdog import watchdog, watched

LIMIT_S = 0.5
RUN = Experiment(
    sim=replace(SIM, tasks=("reach",), max_steps=100),
    start=Imitation(episodes=4, policy=SMALL, bc=BCConfig(steps=2, batch_size=8)),
    algorithm=replace(PPO, iterations=2, rollout_shards=1),
    evaluation=EvaluationConfig(
        episodes=4, validation_episodes=4, validate_every=2, videos_per_task=0, control_episodes=4
    ),
    watchdog_s=LIMIT_S,
    device="cpu",
)


STEPPING = {
    0: "imitate/demonstrate",
    2: "evaluate_before",
    3: "reinforce/simulate",
    4: "evaluate_after",
    5: "evaluate_controls",
}  # by the number of stages that are complete


class HangingEnv(EnvWrapper):
    """Hangs once in each stage of the run in ``folder`` that steps it, until that is reported."""

    def __init__(self, env: VectorEnv, folder: Path, hung: set[int]) -> None:
        super().__init__(env)
        self.folder, self.hung = folder, hung

    def expert(self, *, noise: float, seed: int) -> Expert:
        assert isinstance(self.env, DemonstratedEnv)
        return self.env.expert(noise=noise, seed=seed)

    def step(self, action: Tensor) -> Step:
        if (done := len(read_stages(self.folder))) not in self.hung:
            self.hung.add(done)
            hang(self.folder, STEPPING[done])
        return self.env.step(action)


def hang(folder: Path, stage: str, *, at_most_s: float = 30 * LIMIT_S) -> None:
    """Until the watchdog has named ``stage``, or for a long time."""
    wait_for(lambda: stage in lines(folder), at_most_s=at_most_s)


def wait_for(condition: Callable[[], bool], *, at_most_s: float) -> None:
    began = time.monotonic()
    while not condition() and time.monotonic() - began < at_most_s:
        time.sleep(0.02)


def lines(folder: Path) -> list[str]:
    """The stages that were reported."""
    path = folder / "watchdog.txt"
    text = path.read_text() if path.exists() else ""
    return [line.split("'")[1] for line in text.splitlines() if line.startswith("stage '")]


@pytest.mark.usefixtures("one_thread")
def test_every_stage_of_a_run_that_hangs_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The simulator where it is made and stepped, and files that are pipes with nobody at the other end."""
    folder, hung = tmp_path / "run", set[int]()
    metrics, page = folder / "imitation" / "metrics.jsonl", folder / "report.html"
    metrics.parent.mkdir(parents=True)
    for path in (metrics, page):
        os.mkfifo(path)

    def made(config: object) -> HangingEnv:
        if not hung:
            time.sleep(3 * LIMIT_S)
        return HangingEnv(make_env(config), folder, hung)

    def open_pipes() -> None:
        for stage, opened in (("imitate", lambda: metrics.open("w").close()), ("report", page.read_bytes)):
            hang(folder, stage, at_most_s=240)  # from before the stage begins, to which a busy machine comes late
            opened()

    monkeypatch.setattr(vla_rl.runners.train, "make_env", made)
    other = threading.Thread(target=open_pipes, daemon=True)
    other.start()
    vla_rl.runners.train.train(RUN, folder, resume=False, command="vla-rl train small.yaml")
    other.join(10)
    assert not other.is_alive()
    # Others may have been slow, on a busy machine.
    assert set(lines(folder)) >= {*STEPPING.values(), "imitate", "report"}
    assert (folder / "watchdog.txt").read_text().count("in hang\n") >= len(STEPPING)
    assert "stage 'make the simulator' has not moved" in capfd.readouterr().err


def test_validation_that_hangs_is_named(tmp_path: Path) -> None:
    """It is part of an iteration, whose sections have names of their own."""
    timer = Timer()
    inner = watchdog(timer, tmp_path, limit_s=LIMIT_S)
    with watched("reinforce", tmp_path, limit_s=60), inner, timer.section("validate"):
        for _ in range(10):
            beat()
            time.sleep(LIMIT_S / 5)
        assert not lines(tmp_path)
        time.sleep(3 * LIMIT_S)
    assert lines(tmp_path) == ["reinforce/validate"]


def test_the_watchdog_names_the_section_that_hangs_and_every_thread(tmp_path: Path) -> None:
    timer = Timer()
    with watchdog(timer, tmp_path, limit_s=0.2), timer.section("render"):
        time.sleep(0.7)
    assert lines(tmp_path) == ["render"]
    assert "test_the_watchdog_names_the_section" in (tmp_path / "watchdog.txt").read_text()


def test_a_run_that_moves_is_not_reported(tmp_path: Path) -> None:
    timer = Timer()
    with watched("reinforce", tmp_path, limit_s=0.3), watchdog(timer, tmp_path, limit_s=0.3):
        for _ in range(20):
            with timer.section("simulate"):
                time.sleep(0.03)
    with watched("evaluate", tmp_path, limit_s=0.3):
        for _ in range(20):
            beat()
            time.sleep(0.03)
    assert not (tmp_path / "watchdog.txt").exists()


def test_what_is_around_is_watched_again(tmp_path: Path) -> None:
    with watched("imitate", tmp_path, limit_s=LIMIT_S):
        with watched("demonstrate", tmp_path, limit_s=LIMIT_S):
            time.sleep(0.9 * LIMIT_S)
        time.sleep(0.5 * LIMIT_S)  # the time before belongs to the stage inside
        assert not lines(tmp_path)
        time.sleep(1.5 * LIMIT_S)
    assert lines(tmp_path) == ["imitate"]


def test_a_call_that_holds_the_lock_of_python_leaves_its_stack(tmp_path: Path) -> None:
    """No thread of Python runs meanwhile."""
    with watched("simulate", tmp_path, limit_s=LIMIT_S):
        time.sleep(0.5 * LIMIT_S)
        ctypes.PyDLL(None).usleep(int(4e6 * LIMIT_S))
        text = (tmp_path / "watchdog.txt").read_text()
    assert text.startswith("Timeout (") and "test_a_call_that_holds_the_lock" in text
