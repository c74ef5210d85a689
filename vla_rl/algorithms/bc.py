"""Behaviour cloning: conditional flow matching (or denoising) on windows of the episode store."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from episodes.sampler import Batch
from policies.denoising_policy import DenoisingPolicy


@dataclass(frozen=True, kw_only=True)
class BCConfig:
    """AdamW with a linear warm-up of ``warmup`` steps and a cosine decay over ``steps``."""

    steps: int = 1500
    batch_size: int = 256
    learning_rate: float = 1e-3
    warmup: int = 50
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0


def cosine_schedule(step: int, *, steps: int, warmup: int, floor: float = 0.05) -> float:
    """Factor on the learning rate: linear warm-up, then half a cosine down to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class BC:
    """Owns the optimizer and the generator of imitation."""

    def __init__(self, policy: DenoisingPolicy, config: BCConfig, generator: torch.Generator) -> None:
        self.policy, self.config, self.generator, self.step = policy, config, generator, 0
        self.parameters = policy.trainable_parameters(encoder=True)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.95)
        )

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "policy": self.policy.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.policy.load_state_dict(state["policy"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])

    def update(self, batch: Batch) -> dict[str, float]:
        rate = self.config.learning_rate * cosine_schedule(
            self.step, steps=self.config.steps, warmup=self.config.warmup
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.policy.bc_loss(self.policy.encode(batch.obs), batch.action, batch.mask, self.generator)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        self.optimizer.step()
        self.step += 1
        return {"bc_loss": loss.item(), "bc_grad_norm": norm.item(), "bc_learning_rate": rate}
