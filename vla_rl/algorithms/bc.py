"""Behaviour cloning: conditional flow matching (or denoising) on windows of the episode store."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from episodes.sampler import Batch
from policies.policy import Policy


@dataclass(frozen=True, kw_only=True)
class BCConfig:
    """``shift``: random image translation in pixels, the same for a window's cameras; 0 turns it off."""

    steps: int = 1500
    batch_size: int = 256
    learning_rate: float = 1e-3
    warmup: int = 50
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    shift: int = 0


def cosine_schedule(step: int, *, steps: int, warmup: int, floor: float = 0.05) -> float:
    """Factor on the learning rate: linear warm-up, then half a cosine down to ``floor``."""
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


class BC:
    """Owns the optimizer and the generator of imitation."""

    def __init__(self, policy: Policy, config: BCConfig, generator: torch.Generator) -> None:
        self.policy, self.config, self.generator, self.step = policy, config, generator, 0
        self.parameters = policy.trainable_parameters(encoder=True)
        self.optimizer = torch.optim.AdamW(
            self.parameters, lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.95)
        )

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
