"""Behavior cloning: conditional flow matching (or denoising) on windows of the episode store."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from episodes.sampler import WindowBatch
from policies.denoising.policy import DenoisingPolicy
from policies.schedule import cosine_schedule
from sims.errors import UserError
from vla_rl.algorithms.shards import Shards


@dataclass(frozen=True, kw_only=True)
class BCConfig:
    """AdamW with a linear warm-up of ``warmup`` steps and a cosine decay over ``steps``.

    ``matrix_learning_rate``: of Muon for the encoder's weight matrices (Jordan et al. 2024, with the update's size
    matched to AdamW's as in Liu et al. 2025, Sec. 2.2), AdamW then moves the rest alone; null: AdamW moves everything.
    The action expert is left to AdamW: what Muon has trained, PPO moves only half as fast (docs/status.md).
    ``shards``: parts of a batch whose gradients are taken side by side, where there are so many cores (shards.py).
    """

    steps: int = 1500
    batch_size: int = 256
    learning_rate: float = 1e-3
    matrix_learning_rate: float | None = None
    warmup: int = 50
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    shards: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shards <= self.batch_size:
            raise ValueError(f"bc.shards must be within 1..{self.batch_size}, the batch size, got {self.shards}")


SMALLEST_MATRIX = 8  # below, orthogonalizing the update means little


def imitation_loss(policy: DenoisingPolicy, batch: WindowBatch, generator: torch.Generator) -> Tensor:
    """Look, then score what was done and where it led."""
    targets = batch.targets
    return policy.bc_loss(policy.encode(batch.obs), targets.action, targets.mask, generator, targets.future)


class BC:
    """Owns the optimizers and the generators of imitation, one for each shard."""

    def __init__(self, policy: DenoisingPolicy, config: BCConfig, *, seed: int) -> None:
        self.policy, self.config, self.step = policy, config, 0
        self.generators = [torch.Generator().manual_seed(seed + shard) for shard in range(config.shards)]
        self.shards = Shards(policy, imitation_loss, count=config.shards)
        self.parameters = policy.trainable_parameters(encoder=True)
        matrices: list[torch.nn.Parameter] = []
        rest: list[torch.nn.Parameter] = []
        expert = {id(parameter) for parameter in policy.trainable_parameters(encoder=False)}
        for parameter in self.parameters:
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > SMALLEST_MATRIX and id(parameter) not in expert
            (matrices if is_matrix and config.matrix_learning_rate is not None else rest).append(parameter)
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.AdamW(rest, lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.95))
        ]
        if config.matrix_learning_rate is not None:
            if not hasattr(torch.optim, "Muon"):
                raise UserError(f"bc.matrix_learning_rate needs torch 2.9 or later, this is {torch.__version__}")
            self.optimizers.append(
                torch.optim.Muon(
                    matrices, lr=config.matrix_learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
                )
            )

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "policy": self.policy.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generators": [generator.get_state() for generator in self.generators],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.policy.load_state_dict(state["policy"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)

    def update(self, batch: WindowBatch) -> dict[str, float]:
        factor = cosine_schedule(self.step, steps=self.config.steps, warmup=self.config.warmup)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = factor * group.setdefault("initial_lr", group["lr"])
        loss = self.shards.backward(batch, self.generators)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        rate = self.optimizers[0].param_groups[0]["lr"]
        return {"bc_loss": loss, "bc_grad_norm": norm.item(), "bc_learning_rate": rate}

    def close(self) -> None:
        self.shards.close()
