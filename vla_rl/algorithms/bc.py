"""Behavior cloning on windows of episode stores."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from episodes.sampler import WindowBatch, WindowSampler
from policies.policy import Policy, set_frozen, trained_parameters
from policies.schedule import cosine_schedule
from sims.errors import UserError
from vla_rl.algorithms.shards import GradientShards


@dataclass(frozen=True, kw_only=True)
class BCConfig:
    """AdamW with a linear warm-up of ``warmup`` steps and a cosine decay over ``steps``.

    ``matrix_learning_rate``: of Muon (Jordan et al. 2024, with the update's size matched to AdamW's as in Liu et al.
    2025, Sec. 2.2) for the weight matrices of the policy's parameter groups ``matrix_groups``; AdamW then trains the
    rest alone. null: AdamW trains everything. Action experts are better left to AdamW: after Muon, PPO changes them
    only half as fast (docs/algorithms.md). ``shards``: parts of a batch whose gradients are computed side by side,
    where there are as many cores (shards.py).
    """

    steps: int = 1500
    batch_size: int = 256
    learning_rate: float = 1e-3
    matrix_learning_rate: float | None = None
    matrix_groups: tuple[str, ...] = ("encoder",)
    warmup: int = 50
    weight_decay: float = 1e-4
    max_grad_norm: float = 1.0
    shards: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.shards <= self.batch_size:
            raise ValueError(f"bc.shards must be within 1..{self.batch_size}, the batch size, got {self.shards}")


SMALLEST_MATRIX = 8  # below, orthogonalizing the update means little


def bc_loss(policy: Policy, batch: WindowBatch, generator: torch.Generator) -> Tensor:
    context, _ = policy.encode(batch.obs, policy.initial_state(len(batch)))
    return policy.bc_loss(context, batch.targets, generator)


class BC:
    """One fit (vla_rl/runners/fit.py): each update takes equal shares of a batch from every sampler."""

    def __init__(self, policy: Policy, config: BCConfig, samplers: Sequence[WindowSampler], *, seed: int) -> None:
        self.policy, self.config, self.samplers, self.step = policy, config, samplers, 0
        self.generators = [torch.Generator().manual_seed(seed + shard) for shard in range(config.shards)]
        set_frozen(policy, ())
        self.parameters = trained_parameters(policy)
        self.shards = GradientShards(policy, bc_loss, count=config.shards)
        self.optimizers = _optimizers(policy, config)

    @property
    def steps(self) -> int:
        return self.config.steps

    def update(self) -> dict[str, float]:
        batch = WindowBatch.cat([sampler.next_batch() for sampler in self.samplers])
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

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "policy": self.policy.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generators": [generator.get_state() for generator in self.generators],
            "samplers": [sampler.state_dict() for sampler in self.samplers],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.policy.load_state_dict(state["policy"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            generator.set_state(saved)
        for sampler, position in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(position)

    def close(self) -> None:
        self.shards.close()


def _optimizers(policy: Policy, config: BCConfig) -> list[torch.optim.Optimizer]:
    """AdamW, and Muon where the configuration asks for it and the policy has such matrices."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameters in policy.parameter_groups().items():
        orthogonal = config.matrix_learning_rate is not None and name in config.matrix_groups
        for parameter in parameters:
            is_matrix = parameter.ndim == 2 and min(parameter.shape) > SMALLEST_MATRIX
            (matrices if orthogonal and is_matrix else rest).append(parameter)
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(rest, lr=config.learning_rate, weight_decay=config.weight_decay, betas=(0.9, 0.95))
    ]
    if matrices and config.matrix_learning_rate is not None:
        if not hasattr(torch.optim, "Muon"):
            raise UserError(f"bc.matrix_learning_rate needs torch 2.9 or later, this is {torch.__version__}")
        optimizers.append(
            torch.optim.Muon(matrices, lr=config.matrix_learning_rate, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        )
    return optimizers
