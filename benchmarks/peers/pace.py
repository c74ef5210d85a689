"""One contender: a process that runs iterations when it is told to, and says how long their two parts took.

    python -m benchmarks.peers.pace NAME WORK [CHECKOUT]

Each line on standard input asks for one iteration; each answer is a Measured as a line of JSON. A contender calls
``begin`` at the start of every iteration, also after the last, and ``rolled_out`` between rollout and update.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from benchmarks.peers.work import Work
from sims.bench.peers import cpu_seconds

CONTENDERS = {
    "ours": "benchmarks.peers.ours",
    "dppo": "benchmarks.peers.dppo",
    "reinflow": "benchmarks.peers.reinflow",
    "stable-baselines3": "benchmarks.peers.stable_baselines",
    "cleanrl": "benchmarks.peers.cleanrl",
}


@dataclass(frozen=True, kw_only=True)
class Measured:
    """``*_s``: wall time. ``*_cpu_s``: user and system time of the process and its simulators."""

    rollout_s: float
    update_s: float
    rollout_cpu_s: float
    update_cpu_s: float
    gradient_steps: int


@dataclass(frozen=True)
class Moment:
    """``cpu``: of this process and all below it."""

    wall: float
    cpu: float

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter(), cpu_seconds(set(family(os.getpid()))))


class Finished(Exception):
    """No further iteration is asked for."""


class Pace:
    """Waits for requests, and measures."""

    def __init__(self, requests: IO[str], answers: IO[str]) -> None:
        self._requests, self._answers = requests, answers
        self._began: Moment | None = None
        self._rolled_out: Moment | None = None
        self.gradient_steps = 0

    def begin(self) -> None:
        """Raises Finished when nothing more is asked for."""
        if self._began is not None:
            self._report(self._began, Moment.now())
        if not self._requests.readline():
            raise Finished
        self.gradient_steps, self._rolled_out, self._began = 0, None, Moment.now()

    def rolled_out(self) -> None:
        self._rolled_out = Moment.now()

    def count(self, *optimizers: torch.optim.Optimizer) -> None:
        """Count the steps of these optimizers as gradient steps."""
        for optimizer in optimizers:
            optimizer.register_step_post_hook(lambda *_: setattr(self, "gradient_steps", self.gradient_steps + 1))

    def _report(self, began: Moment, ended: Moment) -> None:
        middle = self._rolled_out
        assert middle is not None, "the contender never said that its rollout was over"
        measured = Measured(
            rollout_s=middle.wall - began.wall,
            update_s=ended.wall - middle.wall,
            rollout_cpu_s=middle.cpu - began.cpu,
            update_cpu_s=ended.cpu - middle.cpu,
            gradient_steps=self.gradient_steps,
        )
        print(json.dumps(dataclasses.asdict(measured)), file=self._answers, flush=True)


def family(pid: int) -> Iterator[int]:
    """``pid`` and all its descendants."""
    yield pid
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            yield from family(int(child))


def main() -> None:
    name, work, *checkout = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the peers print
    torch.set_num_threads(1)
    settings = json.loads(work)
    settings |= {key: tuple(settings[key]) for key in ("hidden", "critic_hidden")}
    run = importlib.import_module(CONTENDERS[name]).run
    with contextlib.suppress(Finished):
        run(Pace(sys.stdin, answers), Work(**settings), *map(Path, checkout))


if __name__ == "__main__":
    main()
