"""Every demonstrator of the suite, by its name in the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sims.tabletop.demonstrators.biased import BiasedDemonstrator
from sims.tabletop.demonstrators.human import HumanDemonstrator

DemonstratorName = Literal["biased", "human"]
Demonstrator = BiasedDemonstrator | HumanDemonstrator

DEMONSTRATORS: Mapping[DemonstratorName, type[Demonstrator]] = {
    "biased": BiasedDemonstrator,
    "human": HumanDemonstrator,
}
