"""Arguments and steps that several commands share."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import arg

if TYPE_CHECKING:
    from vla_rl.config.experiment import Experiment

Json = Annotated[bool, arg(help="one JSON object on standard output")]


def load_experiment(config: Path, overrides: Sequence[str] = ()) -> Experiment:
    """The experiment that a YAML file and ``--section.key value`` describe. Raises ConfigError, a UserError."""
    from vla_rl.config.experiment import Experiment
    from vla_rl.config.loader import load_config

    return load_config(Experiment, config, overrides)
