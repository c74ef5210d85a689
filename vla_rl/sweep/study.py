"""The study of a sweep: an SQLite file that Optuna keeps; a killed sweep goes on from it as if it had not been."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from sims.errors import UserError
from sims.numbers.seeding import spawn_seed
from vla_rl.config.experiment import Experiment
from vla_rl.sweep.config import Range, SweepConfig
from vla_rl.sweep.space import Settings, is_integer

STUDY_FILE = "study.db"
State = Literal["complete", "pruned", "failed"]


def check_optuna() -> None:
    """Raises UserError if Optuna is not installed."""
    if find_spec("optuna") is None:
        raise UserError("Optuna is not installed. Run: pip install 'vla-rl[sweep]'")


class Pruned(Exception):
    """A trial that is not worth more runs."""


class Trials:
    """The trials of the study in ``folder``, one at a time.

    The settings of a trial depend on the trials before it and on its number alone, and are stored in one transaction.
    """

    def __init__(self, folder: Path, config: SweepConfig, experiment: Experiment) -> None:
        """``experiment``: any of the sweep, which says what is an integer."""
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna, self._config = optuna, config
        self._distributions = {name: self._distribution(experiment, name) for name in config.settings}
        lists = {name: values for name, values in config.settings.items() if not isinstance(values, Range)}
        self._lists = lists if len(lists) == len(config.settings) else None
        self._storage = optuna.storages.RDBStorage(f"sqlite:///{folder.resolve() / STUDY_FILE}")
        pruner: Any = optuna.pruners.NopPruner()
        if config.pruning is not None:
            pruner = optuna.pruners.MedianPruner(
                n_startup_trials=config.pruning.startup_trials, n_warmup_steps=config.pruning.warmup
            )
        self._study = optuna.create_study(
            study_name="sweep", storage=self._storage, direction="maximize", pruner=pruner, load_if_exists=True
        )

    def close(self) -> None:
        self._storage.engine.dispose()

    def __len__(self) -> int:
        """Trials that began."""
        return len(self._study.get_trials(deepcopy=False))

    def unfinished(self) -> int | None:
        """The trial that was interrupted, if any."""
        running = self._optuna.trial.TrialState.RUNNING
        return next((trial.number for trial in self._study.get_trials(states=(running,))), None)

    def begin(self) -> int | None:
        """A new trial; its number. None where every combination of lists was tried."""
        number = len(self)
        seed = spawn_seed(self._config.sampler_seed, "trial", number) % 2**32
        scratch = self._optuna.create_study(direction="maximize", sampler=self._optuna.samplers.TPESampler(seed=seed))
        scratch.add_trials(self._study.get_trials())
        settings = scratch.ask(self._distributions).params
        if self._lists is not None:
            tried = [trial.params for trial in self._study.get_trials(deepcopy=False)]
            if len(tried) >= math.prod(len(values) for values in self._lists.values()):
                return None
            rng = random.Random(seed)
            while settings in tried:  # its runs would repeat those of that trial
                settings = {name: rng.choice(values) for name, values in self._lists.items()}
        running = self._optuna.trial.TrialState.RUNNING
        self._study.add_trial(
            self._optuna.create_trial(state=running, params=settings, distributions=self._distributions)
        )
        return number

    def settings(self, number: int) -> Settings:
        params = self._frozen(number).params
        return {name: params[name] for name in self._config.settings}

    def report(self, number: int, curve: Sequence[float]) -> None:
        """Record what is new of a trial's ``curve``, a value per validation. Raises Pruned where it should end."""
        known = len(self._frozen(number).intermediate_values)
        trial = self._optuna.trial.Trial(self._study, self._frozen(number)._trial_id)
        for step in range(max(0, known - 1), len(curve)):  # an interrupted trial was perhaps not compared
            if step >= known:
                trial.report(curve[step], step)
            if trial.should_prune():
                raise Pruned(f"below the median of the complete trials after {step + 1} validations")

    def end(self, number: int, state: State, *, value: float | None = None, message: str = "") -> None:
        frozen = self._frozen(number)
        if message:
            self._storage.set_trial_user_attr(frozen._trial_id, "message", message)
        states = self._optuna.trial.TrialState
        ends = {"complete": states.COMPLETE, "pruned": states.PRUNED, "failed": states.FAIL}
        self._study.tell(number, value, state=ends[state])

    def records(self) -> list[dict[str, Any]]:
        """{trial, state, value, settings, message, curve} of each; the value of one that was pruned is its last."""
        names = {"COMPLETE": "complete", "PRUNED": "pruned", "FAIL": "failed", "RUNNING": "running"}
        return [
            {
                "trial": trial.number,
                "state": names[trial.state.name],
                "value": trial.value if trial.state.name in ("COMPLETE", "PRUNED") else None,
                "settings": {name: trial.params[name] for name in self._config.settings},
                "message": trial.user_attrs.get("message", ""),
                "curve": [trial.intermediate_values[step] for step in sorted(trial.intermediate_values)],
            }
            for trial in self._study.get_trials()
        ]

    def _frozen(self, number: int) -> Any:
        return self._study.get_trials(deepcopy=False)[number]

    def _distribution(self, experiment: Experiment, name: str) -> Any:
        values, kinds = self._config.settings[name], self._optuna.distributions
        if not isinstance(values, Range):
            return kinds.CategoricalDistribution(values)
        if is_integer(experiment, name):
            return kinds.IntDistribution(int(values.low), int(values.high), log=values.log)
        return kinds.FloatDistribution(float(values.low), float(values.high), log=values.log)


@contextmanager
def open_trials(folder: Path, config: SweepConfig, experiment: Experiment) -> Iterator[Trials]:
    trials = Trials(folder, config, experiment)
    try:
        yield trials
    finally:
        trials.close()
