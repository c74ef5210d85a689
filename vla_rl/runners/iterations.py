"""The iterations of an algorithm, with validation, metrics and checkpoints, from which a run continues exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from sims.devices.crossing import crossing
from sims.subproc.termination import Terminated, interruptible, uninterrupted
from vla_rl.algorithms.algorithm import Algorithm, Metrics
from vla_rl.config.experiment import Experiment
from vla_rl.runs.checkpoint import latest_checkpoint, load_checkpoint, save_checkpoint
from vla_rl.runs.failures import FailureLog
from vla_rl.runs.metrics import MetricsWriter
from vla_rl.runs.progress import Advance, progress
from vla_rl.runs.quarantine import quarantine
from vla_rl.runs.timeline import TRACE_FILE, Timeline


class Iterations:
    """``validate``: called every ``evaluation.validate_every`` iterations, where it is set. ``recorded``: called after
    each iteration, when its metrics are written; what it raises ends the run, which can be resumed.

    A signal to end stops a rollout or a validation, and nothing else; what is saved then is the state before it.
    ``_before``: of the rollouts, there. ``_unrecorded``: metrics of an iteration that is complete but for its
    validation.
    """

    def __init__(self, algorithm: Algorithm, checkpoints: Path, experiment: Experiment, failures: FailureLog) -> None:
        self.algorithm, self.checkpoints, self.experiment, self.failures = algorithm, checkpoints, experiment, failures
        self.validate: Callable[[], Metrics] | None = None
        self.recorded: Callable[[], None] = lambda: None
        self._before: Mapping[str, Any] | None = None
        self._unrecorded: Metrics | None = None

    def restore(self) -> None:
        """Continue from the latest checkpoint, or write the first."""
        latest = latest_checkpoint(self.checkpoints)
        if latest is None:
            self._save()
            return
        with crossing("checkpoint"):
            # Learners that divide the weights read their parts themselves.
            state = load_checkpoint(latest, unread=["update"] if self.experiment.divides_weights else [])
            self._unrecorded = state.pop("unrecorded", None)
            restore_algorithm(self.algorithm, state)

    def run(self, folder: Path, start: Path, *, afterwards_s: float | None) -> None:
        """The iterations that are left. ``start``: the bundle of the policy that they began with."""
        total, done = self.experiment.algorithm.iterations, self._recorded()
        timer = self.algorithm.collector.timer
        timeline = Timeline(folder / TRACE_FILE, iterations=self.experiment.trace)
        timer.record(timeline.left > 0)
        with (
            MetricsWriter(folder, next_iteration=done, wandb=self.experiment.wandb) as record,
            progress("reinforce", total, done=done, afterwards_s=afterwards_s) as advance,
        ):
            try:
                while (number := self._recorded()) < total:
                    with quarantine(folder, "iteration", number, start=start), uninterrupted():
                        self._step(record, advance)
                    timeline.add(number, timer.take_spans())
                    timer.record(timeline.left > 0)
                    self.recorded()
            except Terminated:  # between two iterations too
                self._save_as_before()
                raise

    def _recorded(self) -> int:
        return self.algorithm.iteration - (self._unrecorded is not None)

    def _step(self, record: MetricsWriter, advance: Advance) -> None:
        algorithm, experiment = self.algorithm, self.experiment
        if self._unrecorded is None:
            self._before = algorithm.collector.state_dict()
            self._unrecorded = algorithm.iterate()
        metrics = self._unrecorded | self._validation(self._unrecorded)
        self._before = None
        if failed := self.failures.write(f"iteration {algorithm.iteration - 1}"):
            metrics |= {"worker_failures": float(failed)}
        record.write(algorithm.iteration - 1, metrics)
        self._unrecorded = None
        shown = [(name, metrics[name]) for name in ("success", "kl") if name in metrics]
        advance(note="  ".join(f"{name} {value:.3f}" for name, value in shown if math.isfinite(value)))
        if (
            algorithm.iteration % experiment.checkpoint_every == 0
            or algorithm.iteration == experiment.algorithm.iterations
        ):
            self._save()

    def _validation(self, iterated: Metrics) -> Metrics:
        """Its metrics, and the seconds per section of it and of the iteration that is validated, ``iterated``."""
        if self.validate is None or self.algorithm.iteration % self.experiment.evaluation.validate_every:
            return {}
        rollouts = self.algorithm.collector
        self._before = rollouts.state_dict()
        with interruptible(), rollouts.timer.section("validate"):
            metrics = self.validate()
        return metrics | {name: iterated.get(name, 0.0) + value for name, value in rollouts.timer.take().items()}

    def _save(self) -> None:
        with self.algorithm.collector.timer.section("save"):
            save_checkpoint(self.checkpoints, self.algorithm.iteration, algorithm_state(self.algorithm))

    def _save_as_before(self) -> None:
        """The rollouts or the environment may have stopped halfway: their state is not asked for."""
        state = algorithm_state(self.algorithm, rollouts=self._before)
        if self._unrecorded is not None:
            state |= {"unrecorded": self._unrecorded}
        save_checkpoint(self.checkpoints, self.algorithm.iteration, state)


def algorithm_state(algorithm: Algorithm, *, rollouts: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Of the algorithm and its rollouts; ``rollouts``: the state of these at an earlier moment."""
    collector = algorithm.collector.state_dict() if rollouts is None else rollouts
    return {**algorithm.state_dict(), "collector": collector}


def restore_algorithm(algorithm: Algorithm, state: Mapping[str, Any]) -> None:
    """Continue exactly from ``algorithm_state``."""
    algorithm.collector.load_state_dict(state["collector"])
    algorithm.load_state_dict({name: part for name, part in state.items() if name != "collector"})
