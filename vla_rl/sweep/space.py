"""From the settings of a sweep to experiments; what any trial could be is checked before the first begins."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sims.errors import UserError, did_you_mean
from vla_rl.config.experiment import Experiment
from vla_rl.config.loader import load_config
from vla_rl.config.overrides import parse_overrides
from vla_rl.config.schema import config_fields
from vla_rl.sweep.config import Range, Scalar, SweepConfig

Settings = Mapping[str, Scalar]
MOST_CORNERS = 256  # combinations of the settings' values that are checked


@dataclass(frozen=True, kw_only=True)
class Space:
    """The experiment in ``file`` with ``overrides``, and the settings that vary."""

    file: Path
    overrides: Sequence[str]
    config: SweepConfig

    def experiment(self, settings: Settings, seed: int) -> Experiment:
        """Of one run. Raises ConfigError."""
        return load_config(Experiment, self.file, self.tokens(settings, seed))

    def tokens(self, settings: Settings, seed: int) -> list[str]:
        """``--section.key value`` of the command line."""
        own = [token for name, value in settings.items() for token in (f"--{name}", json.dumps(value))]
        return [*self.overrides, *own, "--seed", str(seed)]

    def check(self) -> None:
        """UserError where a setting does not exist or is given twice, or a combination of ends of ranges and choices is
        refused."""
        self._check_overrides()
        known = dict.fromkeys(field.path for field in config_fields(Experiment))
        for name in self.config.settings:
            if name not in known:
                raise UserError(f"settings: no setting {name!r}{did_you_mean(name, known)}")
        for settings in self.corners():
            try:
                self.experiment(settings, self.config.seeds[0])
            except UserError as error:
                raise UserError(f"settings: with {shown(settings)}: {error}") from None

    def _check_overrides(self) -> None:
        for keys, _ in parse_overrides(self.overrides):
            name = ".".join(keys)
            if name == "seed":
                raise UserError("--seed: a sweep has a run for each of its seeds; set seeds in the file of the sweep")
            if name in self.config.settings:
                raise UserError(f"--{name}: the sweep searches it; leave it out, here or in the file of the sweep")

    def corners(self) -> Iterator[Settings]:
        """Every combination of ends and choices; where these are too many, some, drawn at random."""
        ends = self._ends()
        count = math.prod(len(values) for values in ends.values())
        chosen = range(count) if count <= MOST_CORNERS else random.Random(0).sample(range(count), MOST_CORNERS)
        for number in chosen:
            settings = {}
            for name, values in ends.items():
                number, place = divmod(number, len(values))
                settings[name] = values[place]
            yield settings

    def each_value(self) -> Iterator[Settings]:
        """A few combinations in which every end and every choice occurs."""
        ends = self._ends()
        for place in range(max(len(values) for values in ends.values())):
            yield {name: values[place % len(values)] for name, values in ends.items()}

    def plain_settings(self) -> dict[str, Any]:
        """Each as in the file: {low, high, log}, or a list."""
        settings = self.config.settings
        return {name: asdict(one) if isinstance(one, Range) else list(one) for name, one in settings.items()}

    def _ends(self) -> dict[str, Sequence[Scalar]]:
        return {
            name: (values.low, values.high) if isinstance(values, Range) else values
            for name, values in self.config.settings.items()
        }


def is_integer(experiment: Experiment, name: str) -> bool:
    """Whether the setting is an integer in ``experiment``."""
    value: Any = experiment
    for key in name.split("."):
        value = getattr(value, key)
    return isinstance(value, int)


def shown(settings: Settings) -> str:
    return ", ".join(f"{name} {short(value)}" for name, value in settings.items())


def short(value: Scalar) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value).strip('"')
