"""Random signals to every process of a run on a Ray cluster, which must end with the numbers of an undisturbed run.

    python -m benchmarks.chaos [--minutes 10] [--iterations 200] [--pause-s 8] [--seed 0]

GRPO with two collectors on a Ray cluster of this machine and two learners, synchronous. Every few seconds one process
gets a signal: a collector (every other time), the driver (which learns, too), the second learner, or one of Ray's own
(raylet, its workers and agents, the control store). While a driver starts, one of five gets one. It is SIGKILL or
SIGSTOP. Driver and Ray's own processes go on after a pause of some seconds, as after a machine's sleep; learners and
collectors that are stopped stay so, and the run has to notice. A driver that ended is started again, as a batch system
does; it resumes from the last checkpoint. Run after run, until the time is over and the last run is complete.

The lines of ``metrics.jsonl`` and the weights must be those of a run in one process without Ray, bit for bit. Rows:
episodes of iterations that are missing, or there twice; iterations with other numbers; runs with other weights; hangs,
which are drivers without any progress for STALL_S seconds. Linux. Writes benchmarks/results/chaos.json; fails if one of
them is not 0.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from tests.vla_rl.scale_run import GRPO, experiment, numbers, run_to_end
from vla_rl.bench.record import Row, row, write_record
from vla_rl.config.cluster import ClusterConfig

HANG_S, START_S = 20.0, 240.0
STALL_S = HANG_S + START_S + 90.0  # Ray's processes give up a control store that does not answer after a minute
GIVEN_UP = 10
CLUSTER = ClusterConfig(
    collectors=2, learners=2, cpus=0.1, hang_s=HANG_S, start_timeout_s=START_S, restarts=1000, address="auto"
)
ALGORITHM = replace(GRPO, update=replace(GRPO.update, micro_batch=4))
DRIVER, LEARNER, COLLECTOR, RAY = "driver", "learner", "collector", "Ray's own"


@dataclass(frozen=True)
class Process:
    """``started``: in clock ticks since boot; a number of a process is used again, the two together are not."""

    pid: int
    started: int
    command: str

    def signal(self, number: int) -> bool:
        """Whether it was still there."""
        if start_and_parent(self.pid, self.started) is None:
            return False
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


@dataclass
class Counts:
    """``signals``: by kind of process and signal."""

    signals: Counter[str] = field(default_factory=Counter)
    hangs: int = 0
    starts: int = 0
    left: set[Process] = field(default_factory=set)


def start_and_parent(pid: int, started: int | None = None) -> tuple[int, int] | None:
    """Of the process ``pid``; None where it ended, or (``started``) is another."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    found = int(fields[19]), int(fields[1])
    return found if started in (None, found[0]) and fields[0] != "Z" else None


def descendants(root: int) -> Iterator[Process]:
    """All processes below ``root``."""
    known = {int(path.name): start_and_parent(int(path.name)) for path in Path("/proc").glob("[0-9]*")}
    for pid, about in known.items():
        above = about
        while above is not None and above[1] != root:
            above = known.get(above[1])
        if about is not None and above is not None:
            with suppress(FileNotFoundError, ProcessLookupError):
                command = Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
                yield Process(pid, about[0], command)


def kind(process: Process) -> str | None:
    """Which of them a process below the driver is; None: none of the run's."""
    if "ShardWorker" in process.command:
        return COLLECTOR
    if "multiprocessing.spawn" in process.command:
        return LEARNER
    if "multiprocessing.resource_tracker" in process.command:
        return None
    return RAY


class Chaos:
    """One driver at a time, and what happens to it. ``pause_s``: mean between two signals."""

    def __init__(self, folder: Path, iterations: int, pause_s: float, rng: random.Random) -> None:
        self.folder, self.iterations, self.pause_s, self.rng = folder, iterations, pause_s, rng
        self.counts = Counts()

    def run(self) -> None:
        """Driver after driver, until one is complete. SystemExit where GIVEN_UP in turn get nowhere."""
        fruitless = 0
        while fruitless < GIVEN_UP:
            before = self._progress()
            if self._drive() == 0:
                return
            fruitless = fruitless + 1 if self._progress() == before else 0
        raise SystemExit(f"{fruitless} drivers made no progress, see {self.folder.parent / 'driver.txt'}")

    def _drive(self) -> int:
        """One driver, to its end; the exit code."""
        self.counts.starts += 1
        command = [sys.executable, "-m", "benchmarks.chaos", "--drive", str(self.folder), str(self.iterations)]
        with (
            tempfile.TemporaryDirectory(prefix="chaos-", ignore_cleanup_errors=True) as ray_folder,
            (self.folder.parent / "driver.txt").open("a") as log,
            subprocess.Popen(command, env=os.environ | {"RAY_TMPDIR": ray_folder}, stderr=log, stdout=log) as driver,
        ):
            about = start_and_parent(driver.pid)
            own = Process(driver.pid, about[0] if about else 0, DRIVER)
            try:
                self._disturb(driver, own)
            finally:
                driver.kill()  # where this process is told to end
                self._end_rest()
            code = driver.wait()
            log.write(f"driver {driver.pid}: exit code {code}\n")
        return code

    def _disturb(self, driver: subprocess.Popen[bytes], own: Process) -> None:
        starting, next_at = True, time.monotonic() + self._pause() if self.rng.random() < 0.2 else math.inf
        began, progress, seen = time.time(), self._progress(), time.monotonic()
        while driver.poll() is None:
            time.sleep(0.2)
            self.counts.left |= {process for process in descendants(driver.pid) if kind(process) is not None}
            if self._progress() != progress:
                progress, seen = self._progress(), time.monotonic()
            if starting and self._recorded_since(began):
                starting, next_at = False, time.monotonic() + self._pause()
            if time.monotonic() - seen > STALL_S:
                self.counts.hangs += 1
                own.signal(signal.SIGKILL)
            if time.monotonic() > next_at:
                self._strike(own)
                next_at = time.monotonic() + self._pause()

    def _pause(self) -> float:
        return self.pause_s * (0.3 + 1.4 * self.rng.random())

    def _progress(self) -> list[float]:
        files = [self.folder / name for name in ("metrics.jsonl", "cluster.jsonl", "config.yaml")]
        return [path.stat().st_mtime for path in files if path.exists()]

    def _recorded_since(self, began: float) -> bool:
        path = self.folder / "metrics.jsonl"
        return path.exists() and path.stat().st_mtime > began

    def _strike(self, driver: Process) -> None:
        """A kind of process first, then one of that kind: else most signals would go to Ray's idle workers."""
        by_kind: dict[str, list[Process]] = {DRIVER: [driver]}
        for process in descendants(driver.pid):
            if (name := kind(process)) is not None:
                by_kind.setdefault(name, []).append(process)
        name = COLLECTOR if self.rng.random() < 0.5 and COLLECTOR in by_kind else self.rng.choice(sorted(by_kind))
        victim = self.rng.choice(sorted(by_kind[name], key=lambda process: process.pid))
        stops = self.rng.random() < 0.5
        if not victim.signal(signal.SIGSTOP if stops else signal.SIGKILL):
            return
        self.counts.signals[f"{name}: {'SIGSTOP' if stops else 'SIGKILL'}"] += 1
        if stops and name in (DRIVER, RAY):
            time.sleep(1 + 4 * self.rng.random())
            victim.signal(signal.SIGCONT)

    def _end_rest(self) -> None:
        """Ray's processes end by themselves after their driver, but for those that are stopped."""
        until = time.monotonic() + 15
        while time.monotonic() < until and any(start_and_parent(one.pid, one.started) for one in self.counts.left):
            time.sleep(0.2)
        for process in self.counts.left:
            process.signal(signal.SIGKILL)
        self.counts.left.clear()


def differences(folder: Path, expected: Path) -> Counter[str]:
    """Of a run's record and weights."""
    wanted = {int(line["iteration"]): line for line in numbers(expected)}
    found = numbers(folder)
    times = Counter(int(line["iteration"]) for line in found)

    def episodes(iteration: int) -> int:
        return int(wanted[iteration]["groups_drawn"]) * ALGORITHM.group_size

    weights = [next((one / "bundle").glob("*.safetensors")).read_bytes() for one in (folder, expected)]
    return Counter(
        lost=sum(episodes(iteration) for iteration in wanted if not times[iteration]),
        duplicated=sum((number - 1) * episodes(iteration) for iteration, number in times.items() if number > 1),
        different=sum(line != wanted[int(line["iteration"])] for line in found),
        weights=int(weights[0] != weights[1]),
        episodes=sum(map(episodes, wanted)),
        iterations=len(wanted),
    )


def chaos(folder: Path, *, minutes: float, iterations: int, pause_s: float, seed: int) -> list[Row]:
    """Runs in ``folder`` until ``minutes`` are over; the rows of the record."""
    rng, began, runs = random.Random(seed), time.monotonic(), 0
    drive(folder / "undisturbed", iterations, None)
    total, all_counts = Counter[str](), Counts()
    while not runs or time.monotonic() - began < 60 * minutes:
        run = folder / f"run_{runs}" / "run"
        run.parent.mkdir(parents=True)
        one = Chaos(run, iterations, pause_s, rng)
        one.run()
        total += differences(run, folder / "undisturbed")
        all_counts.signals += one.counts.signals
        all_counts.hangs += one.counts.hangs
        all_counts.starts += one.counts.starts
        runs += 1
    took = f"{runs} runs, {total['iterations']} iterations, {(time.monotonic() - began) / 60:.1f} minutes"
    return [
        row("lost episodes", total["lost"], "episodes", against=f"{total['episodes']} episodes"),
        row("duplicated episodes", total["duplicated"], "episodes", against=f"{total['episodes']} episodes"),
        row("iterations with other numbers", total["different"], "iterations", against=took),
        row("runs with other weights", total["weights"], "runs", against=took),
        row("hangs", all_counts.hangs, "drivers", against=f"{STALL_S:g} s without progress"),
        row("kills", sum(all_counts.signals.values()), "signals", by=dict(sorted(all_counts.signals.items()))),
        row("starts of a driver", all_counts.starts, "drivers", against=f"{runs} runs"),
    ]


def drive(folder: Path, iterations: int, cluster: ClusterConfig | None) -> None:
    """The run of ``folder``, or what is left of it."""
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    run_to_end(folder, experiment(replace(ALGORITHM, iterations=iterations), cluster))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--iterations", type=int, default=200, help="of one run")
    parser.add_argument("--pause-s", type=float, default=8.0, help="mean seconds between two signals")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--drive", nargs=2, metavar=("FOLDER", "ITERATIONS"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drive:
        drive(Path(options.drive[0]), int(options.drive[1]), CLUSTER)
        return
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(143))  # its processes end with it
    with tempfile.TemporaryDirectory() as name:
        rows = chaos(
            Path(name), minutes=options.minutes, iterations=options.iterations, pause_s=options.pause_s,
            seed=options.seed,
        )  # fmt: skip
    write_record("chaos", rows, command="python -m benchmarks.chaos " + " ".join(sys.argv[1:]))
    for one in rows:
        print(f"{one['name']:32} {one['value']:6} {one['unit']:10} {one['against'] or ''}")
    if any(one["value"] for one in rows[:5]):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
