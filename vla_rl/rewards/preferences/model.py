"""A reward from preferences: which of two images is closer to what the instruction says (Bradley and Terry 1952).

    P(second is preferred to first) = sigmoid(r(second) - r(first)),        r(image, instruction) the reward

Christiano et al. 2017 (arXiv:1706.03741, Sec. 2.2.3, Eq. 1) fit it to people's preferences between short segments,
RL-VLM-F (Wang et al. 2024, arXiv:2402.03681) to those of a vision-language model between single images, as here.
RL-VLM-F pays r at every step instead of the environment's reward, and labels new pairs while the policy learns. Here r
is fitted once, to recorded episodes; between 0 and 1 it is a progress model, whose change is paid besides success
(progress/env.py). As each pair is of one instruction, r has an unknown constant for each instruction.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import torch
from jaxtyping import Float
from pydantic import Field
from torch import Tensor

from sims.numbers.ranges import Interval
from sims.vector_env import Observation
from vla_rl.rewards.preferences.truth import TruthLabelsConfig
from vla_rl.rewards.preferences.vlm import VlmLabelsConfig
from vla_rl.rewards.scorer import Scorer, ScorerConfig, Sensors


@dataclass(frozen=True, kw_only=True)
class FileLabelsConfig:
    """``path``: a file of labeled pairs (preferences/pairs.py): a person's, or ``pairs.jsonl`` of another fit."""

    name: Literal["file"] = "file"
    path: Path


@dataclass(frozen=True, kw_only=True)
class PreferenceConfig(ScorerConfig):
    """Settings of ``vla-rl reward fit-preferences``.

    ``labels``: what says which of two images is closer to the goal. ``pairs``: how many are drawn and labeled; those
    of a file are all taken. ``held_out``: share of all starts, and of the drawn pairs, for the report.
    """

    labels: Annotated[TruthLabelsConfig | VlmLabelsConfig | FileLabelsConfig, Field(discriminator="name")] = field(
        default_factory=TruthLabelsConfig
    )
    pairs: Annotated[int, Interval(ge=10, le=10**9)] = 2000


class PreferenceModel(Scorer):
    """``mean`` and ``spread``: of r over the observations that it was fitted to; they are set after the fit."""

    WHAT = "preference model"
    config: PreferenceConfig
    mean: Tensor
    spread: Tensor

    def __init__(self, config: PreferenceConfig, sensors: Sensors) -> None:
        super().__init__(config, sensors)
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("spread", torch.tensor(1.0))

    @torch.no_grad()
    def progress(self, obs: Observation) -> Float[Tensor, " B"]:
        """sigmoid((r - mean) / spread), in the order of r; ``obs.images``: of ``sensors.cameras``."""
        return torch.sigmoid((self.logit(obs) - self.mean) / self.spread)
