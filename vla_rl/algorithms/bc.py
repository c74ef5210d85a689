"""Behavior cloning on windows of episode stores."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from episodes.sampler import Targets, WindowBatch, WindowSampler
from policies.device import Device, make_generator, restore_generator, restore_optimizer
from policies.policy import Policy, set_frozen, trained_parameters
from policies.schedule import cosine_schedule
from sims.devices.crossing import crossing, read_numbers
from sims.numbers.finite import check_metrics
from sims.numbers.ranges import Count, Names, NonNegativeFloat, PositiveFloat, PositiveInt
from sims.numbers.seeding import spawn_seed
from vla_rl.algorithms.encoded_windows import EncodedBatch, EncodedWindows, encode_batch, encodings_are_constant
from vla_rl.algorithms.optimizers import make_optimizers, scale_learning_rates
from vla_rl.algorithms.shards import GradientShards
from vla_rl.rewards.bundle import load_progress_model
from vla_rl.rewards.progress.weights import weigh_by_progress


@dataclass(frozen=True, kw_only=True)
class BCConfig:
    """AdamW with a linear warm-up of ``warmup`` steps and a cosine decay over ``steps``.

    ``matrix_learning_rate``: of Muon (Jordan et al. 2024, with the update's size matched to AdamW's as in Liu et al.
    2025, Sec. 2.2) for the weight matrices of the policy's parameter groups ``matrix_groups``; AdamW then trains the
    rest alone. null: AdamW trains everything. Action experts are better left to AdamW: after Muon, PPO changes them
    only half as fast (docs/algorithms.md). ``shards``: parts of a batch whose gradients are computed side by side,
    where there are as many cores (shards.py). ``frozen``: parameter groups that are not trained; where these make the
    encodings constant, every observation is encoded once, before the first update (encoded_windows.py). ``progress``:
    the folder of a progress model, by which what gets on counts more (RA-BC, rewards/progress/weights.py); null: all
    windows alike.
    """

    steps: PositiveInt = 1500
    batch_size: PositiveInt = 256
    learning_rate: PositiveFloat = 1e-3
    matrix_learning_rate: PositiveFloat | None = None
    matrix_groups: Names = ("encoder",)
    warmup: Count = 50
    weight_decay: NonNegativeFloat = 1e-4
    max_grad_norm: PositiveFloat = 1.0
    shards: PositiveInt = 1
    frozen: Names = ()
    progress: Path | None = None

    def __post_init__(self) -> None:
        if self.shards > self.batch_size:
            raise ValueError(f"bc.shards must not be above the batch size, {self.batch_size}, got {self.shards}")


Loss = Callable[[Policy, Any, Targets, torch.Generator], Tensor]


def policy_loss(policy: Policy, context: Any, targets: Targets, generator: torch.Generator) -> Tensor:
    """The policy's own loss of behavior cloning."""
    return policy.bc_loss(context, targets, generator)


def bc_loss(policy: Policy, batch: WindowBatch, generator: torch.Generator, loss: Loss = policy_loss) -> Tensor:
    return loss(policy, encode_batch(policy, batch), batch.targets, generator)


def encoded_bc_loss(
    policy: Policy, batch: EncodedBatch, generator: torch.Generator, loss: Loss = policy_loss
) -> Tensor:
    return loss(policy, policy.restore(batch.inputs), batch.targets, generator)


class BC:
    """One fit (vla_rl/runners/fit.py): each update takes equal shares of a batch from every sampler.

    ``loss``: of a context and its window's targets (distillation has another than the policy's own).
    """

    def __init__(
        self,
        policy: Policy,
        config: BCConfig,
        samplers: Sequence[WindowSampler],
        *,
        seed: int,
        loss: Loss = policy_loss,
    ) -> None:
        self.policy, self.config, self.step = policy, config, 0
        self.generators = [
            make_generator(policy.device, spawn_seed(seed, "cloning", shard)) for shard in range(config.shards)
        ]
        set_frozen(policy, config.frozen)
        self.parameters = trained_parameters(policy)
        if config.progress is not None:
            model = load_progress_model(config.progress, Device(device=policy.device))
            for sampler in samplers:
                weigh_by_progress(sampler, model)
        self.samplers: Sequence[WindowSampler | EncodedWindows] = samplers
        self.shards: GradientShards[Any]
        if encodings_are_constant(policy, samplers):
            self.samplers = [EncodedWindows(sampler, policy) for sampler in samplers]
            self.shards = GradientShards(policy, partial(encoded_bc_loss, loss=loss), count=config.shards)
        else:
            self.shards = GradientShards(policy, partial(bc_loss, loss=loss), count=config.shards)
        self.optimizers = make_optimizers(
            policy.parameter_groups(),
            learning_rate=config.learning_rate,
            matrix_learning_rate=config.matrix_learning_rate,
            matrix_groups=config.matrix_groups,
            weight_decay=config.weight_decay,
        )

    @property
    def steps(self) -> int:
        return self.config.steps

    def update(self) -> dict[str, float]:
        batches: list[Any] = [sampler.next_batch() for sampler in self.samplers]
        with crossing("batches"):
            batch = type(batches[0]).cat(batches).to(self.policy.device)
        factor = cosine_schedule(self.step, steps=self.config.steps, warmup=self.config.warmup)
        scale_learning_rates(self.optimizers, factor)
        loss = self.shards.backward(batch, self.generators)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, self.config.max_grad_norm)
        rate = self.optimizers[0].param_groups[0]["lr"]
        metrics = {"bc_loss": loss, **read_numbers({"bc_grad_norm": norm}), "bc_learning_rate": rate}
        suspects = {"optimizer": self.optimizers, "policy weight": self.policy}
        check_metrics(metrics, where="behavior cloning", batch=batch, suspects=suspects)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return metrics

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
            restore_optimizer(optimizer, saved)
        for generator, saved in zip(self.generators, state["generators"], strict=True):
            restore_generator(generator, saved)
        for sampler, position in zip(self.samplers, state["samplers"], strict=True):
            sampler.load_state_dict(position)

    def close(self) -> None:
        self.shards.close()
