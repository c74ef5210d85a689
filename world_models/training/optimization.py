"""One optimizer step for everything that is fitted here; a runner repeats it and writes checkpoints."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from policies.device import has_fused_adam, make_generator, restore_generator, restore_optimizer
from policies.schedule import cosine_schedule
from sims.devices.crossing import crossing, read_numbers
from sims.numbers.ranges import Count, NonNegativeFloat, PositiveFloat, PositiveInt
from sims.tensor_dataclass import TensorDataclass
from world_models.data.clip import Clip
from world_models.data.clip_sampler import ClipSampler

E = TypeVar("E", bound=TensorDataclass)


class Optimization(ABC, Generic[E]):
    """Updates of ``model`` on the loss of freshly drawn examples E; a subclass says what is drawn and the loss.

    ``steps``: how many updates there will be. ``max_grad_norm``: None does not clip. ``state_dict`` and
    ``load_state_dict`` make a resumed fit exact.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        steps: int,
        seed: int,
        max_grad_norm: float | None = None,
    ) -> None:
        self.optimizer, self.steps, self.max_grad_norm, self.step = optimizer, steps, max_grad_norm, 0
        self.cpu_s = 0.0  # processor time of all updates, of earlier runs too
        self._model = model
        self._rng = np.random.default_rng(seed)
        self._generator = make_generator(self.device, seed)

    @abstractmethod
    def draw(self) -> E:
        """The examples of the next update."""

    @abstractmethod
    def loss(self, examples: E) -> tuple[Float[Tensor, ""], dict[str, float]]:
        """The loss to minimize, and metrics to report."""

    @abstractmethod
    def learning_rate(self) -> float:
        """Of the next update."""

    def update(self) -> dict[str, float]:
        """One optimizer step; the metrics of ``loss``, the loss and the gradient norm."""
        started = time.process_time()
        with crossing("batches"):
            examples = self.draw().to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        self.optimizer.zero_grad(set_to_none=True)
        loss, metrics = self.loss(examples)
        loss.backward()
        limit = float("inf") if self.max_grad_norm is None else self.max_grad_norm
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), limit)
        self.optimizer.step()
        self.step += 1
        self.cpu_s += time.process_time() - started
        return metrics | read_numbers({"loss": loss, "grad_norm": norm})

    @property
    def device(self) -> torch.device:
        return next(self._model.parameters()).device

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "cpu_s": self.cpu_s,
            "model": self._model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self._rng.bit_generator.state,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.cpu_s = state["step"], state["cpu_s"]
        self._model.load_state_dict(state["model"])
        restore_optimizer(self.optimizer, state["optimizer"])
        self._rng.bit_generator.state = state["rng"]
        restore_generator(self._generator, state["generator"])


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; the learning rate warms up linearly and then falls along half a cosine to a twentieth."""

    steps: PositiveInt = 3000
    batch_size: PositiveInt = 32
    learning_rate: PositiveFloat = 2e-3
    weight_decay: NonNegativeFloat = 0.01
    warmup: Count = 50
    max_grad_norm: PositiveFloat = 1.0


class ClipOptimization(Optimization[Clip]):
    """An ``Optimization`` on clips of one prediction."""

    def __init__(self, model: nn.Module, config: OptimizerConfig, clips: ClipSampler, *, seed: int) -> None:
        optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=config.learning_rate,
            weight_decay=config.weight_decay,
            betas=(0.9, 0.95),
            fused=has_fused_adam(next(model.parameters()).device),
        )
        super().__init__(model, optimizer, steps=config.steps, seed=seed, max_grad_norm=config.max_grad_norm)
        self.clips, self._config = clips, config

    def draw(self) -> Clip:
        return self.clips.draw(self._rng, self._config.batch_size, 1)

    def learning_rate(self) -> float:
        config = self._config
        return config.learning_rate * cosine_schedule(self.step, steps=config.steps, warmup=config.warmup)
