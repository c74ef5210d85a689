"""What the fits of learned rewards share: optimizer, schedule, exact resume, and scores of recorded observations."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from policies.device import default_generator, restore_generator
from policies.schedule import cosine_schedule
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass
from vla_rl.rewards.labels import LabeledEpisodes
from vla_rl.rewards.scorer import Scorer
from world_models.training.optimization import Optimization

WARMUP = 50  # updates in which the learning rate rises
AT_ONCE = 256  # observations that are scored at once
E = TypeVar("E", bound=TensorDataclass)


class ScorerFit(Optimization[E]):
    """AdamW on the head, and on the encoder where it is trained. ``rate``: factor on the learning rate."""

    def __init__(self, model: Scorer, *, steps: int, seed: int, rate: float = 1.0) -> None:
        config = model.config
        trained = model.parameters() if config.train_encoder else model.head.parameters()
        self._highest_rate = rate * config.learning_rate
        optimizer = torch.optim.AdamW(trained, lr=config.learning_rate, weight_decay=config.weight_decay)
        super().__init__(model, optimizer, steps=steps, seed=seed, max_grad_norm=1.0)
        model.train()

    def learning_rate(self) -> float:
        return self._highest_rate * cosine_schedule(self.step, steps=self.steps, warmup=WARMUP)

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"dropout": default_generator(self.device).get_state()}

    def load_state_dict(self, state: dict[str, object]) -> None:
        super().load_state_dict(state)
        dropout = state["dropout"]
        assert isinstance(dropout, Tensor)
        restore_generator(default_generator(self.device), dropout)


@torch.no_grad()
@crossing("evaluation")
def logits(model: Scorer, recorded: LabeledEpisodes, index: Int[np.ndarray, " N"]) -> Float[Tensor, " N"]:
    """Of these observations, on the host."""
    model.eval()
    parts = [recorded.read(index[i : i + AT_ONCE]).obs.to(model.device) for i in range(0, len(index), AT_ONCE)]
    return torch.cat([torch.zeros(0), *(model.logit(obs).cpu() for obs in parts)])
