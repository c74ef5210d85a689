"""One optimizer loop for all that is fitted to clips: dynamics, autoencoders, distilled students."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policies.schedule import cosine_schedule
from world_models.data.clips import Clip, ClipSampler

Metrics = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW; the learning rate warms up linearly and falls along half a cosine to a twentieth."""

    steps: int = 3000
    batch_size: int = 32
    learning_rate: float = 2e-3
    weight_decay: float = 0.01
    warmup: int = 50
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"fit.{name} must be at least 1, got {getattr(self, name)}")


class Optimization(ABC):
    """Steps of AdamW on ``loss`` of fresh clips; ``state_dict`` / ``load_state_dict`` make a resumed fit exact."""

    def __init__(self, model: nn.Module, optimizer: OptimizerConfig, clips: ClipSampler, *, seed: int) -> None:
        self._fitted, self._config, self.clips, self.step = model, optimizer, clips, 0
        self.cpu_s = 0.0  # processor time of all updates, interruptions excluded
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=optimizer.learning_rate,
            weight_decay=optimizer.weight_decay,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._rng = np.random.default_rng(seed)
        self._generator = torch.Generator().manual_seed(seed)

    def draw(self) -> Clip:
        """What the next step learns from."""
        return self.clips.draw(self._rng, self._config.batch_size, 1)

    @abstractmethod
    def loss(self, clip: Clip) -> tuple[Tensor, Metrics]:
        """What one step minimizes, and what it reports."""

    def update(self) -> Metrics:
        """One optimizer step on a fresh batch."""
        config, started = self._config, time.process_time()
        clip = self.draw().to(self.device)
        for group in self.optimizer.param_groups:
            group["lr"] = config.learning_rate * cosine_schedule(self.step, steps=config.steps, warmup=config.warmup)
        self.optimizer.zero_grad(set_to_none=True)
        loss, metrics = self.loss(clip)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._fitted.parameters(), config.max_grad_norm)
        self.optimizer.step()
        self.step += 1
        self.cpu_s += time.process_time() - started
        return metrics | {"loss": loss.item(), "grad_norm": norm.item()}

    @property
    def steps(self) -> int:
        """How many there will be."""
        return self._config.steps

    @property
    def device(self) -> torch.device:
        return next(self._fitted.parameters()).device

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "cpu_s": self.cpu_s,
            "model": self._fitted.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rng": self._rng.bit_generator.state,
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.cpu_s = state["step"], state["cpu_s"]
        self._fitted.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self._rng.bit_generator.state = state["rng"]
        self._generator.set_state(state["generator"])
