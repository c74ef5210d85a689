"""Pretraining of an encoder on labeled scenes: from image, instruction and state to where the named objects are.

No demonstration and no action is used, so behavior cloning later needs to learn only what to do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from policies.compact_encoder import HasCompactEncoder
from policies.device import restore_optimizer
from policies.policy import Policy
from policies.schedule import cosine_schedule
from sims.devices.crossing import crossing, read_numbers
from sims.errors import UserError
from sims.numbers.finite import check_metrics
from sims.numbers.ranges import Count, NonNegativeFloat, PositiveFloat, PositiveInt
from sims.numbers.seeding import spawn_seed
from sims.pretraining import LabeledScenes, PretrainingScenes
from vla_rl.algorithms.optimizers import make_optimizers, scale_learning_rates

TEST_FIRST = 1 << 40  # scenes from this number on are never trained on
TEST_SCENES = 1024
FIRST_SCENES = 4096  # drawn before the first update, and to measure the scale of states
DRAWN_AT_ONCE = 256
HUBER_CORNER = 0.05  # where a landmark is a position in units of 10 cm: 5 mm


@dataclass(frozen=True, kw_only=True)
class PretrainingConfig:
    """Of ``vla-rl pretrain``. Each of ``steps`` updates draws ``fresh`` new scenes and keeps the newest ``pool``.

    ``start``: a backbone to continue from; use another ``seed`` then, for other scenes. Encoder matrices are trained by
    Muon with ``matrix_learning_rate`` (null: AdamW trains everything).
    """

    steps: PositiveInt = 6000
    batch_size: PositiveInt = 128
    fresh: Count = 32
    pool: PositiveInt = 60_000
    start: Literal["tabletop"] | Path | None = None
    learning_rate: PositiveFloat = 2e-3
    matrix_learning_rate: PositiveFloat | None = 4e-3
    warmup: Count = 100
    weight_decay: NonNegativeFloat = 1e-4
    max_grad_norm: PositiveFloat = 1.0

    def __post_init__(self) -> None:
        if self.pool < max(self.fresh, self.batch_size):
            raise ValueError(f"pretraining.pool must hold fresh and batch_size scenes, got {self.pool}")


class ScenePool:
    """The newest ``capacity`` scenes of a sequence; scene i is at place i modulo ``capacity``."""

    def __init__(self, source: PretrainingScenes, *, capacity: int, seed: int) -> None:
        self._source, self._capacity, self._seed = source, capacity, seed
        self._scenes: LabeledScenes | None = None
        self.drawn = 0

    def grow_to(self, drawn: int) -> None:
        """Draw scenes until ``drawn`` were drawn in all; those that would be overwritten at once are left out."""
        self.drawn = max(self.drawn, drawn - self._capacity)
        while self.drawn < drawn:
            count = min(DRAWN_AT_ONCE, drawn - self.drawn)
            new = self._source.scenes(seed=self._seed, first=self.drawn, count=count)
            if self._scenes is None:
                self._scenes = new.map(lambda tensor: tensor.new_zeros(self._capacity, *tensor.shape[1:]))
            places = (self.drawn + torch.arange(count)) % self._capacity
            for kept, tensor in zip(self._scenes.tensors(), new.tensors(), strict=True):
                kept[places] = tensor
            self.drawn += count

    def sample(self, count: int, generator: torch.Generator) -> LabeledScenes:
        assert self._scenes is not None
        return self._scenes[torch.randint(min(self.drawn, self._capacity), (count,), generator=generator)]


class Pretraining:
    """One fit (vla_rl/runners/fit.py) of the encoder of ``policy``."""

    def __init__(
        self, policy: Policy, config: PretrainingConfig, source: PretrainingScenes, *, seed: int, fit_normalizer: bool
    ) -> None:
        """``fit_normalizer``: measure the scale of states on the first scenes. UserError if the policy does not fit."""
        self.policy, self.config, self.step = policy, config, 0
        self.compact = _with_landmarks(policy, source)
        # Scenes are drawn, and drawn from, on the host.
        self.generator = torch.Generator().manual_seed(spawn_seed(seed, "pretraining"))
        self.pool = ScenePool(source, capacity=config.pool, seed=seed)
        self._source = source
        self._test = source.scenes(seed=seed, first=TEST_FIRST, count=TEST_SCENES)
        self._first = min(FIRST_SCENES, config.pool)
        if fit_normalizer:
            self.pool.grow_to(self._first)
            state = self.pool.sample(self._first, self.generator).obs.state
            policy.fit_normalizer(state, torch.zeros(1, policy.spec.robot.action_dim))
        self.parameters = list(self.compact.encoder.parameters())
        self.optimizers = make_optimizers(
            {"encoder": self.parameters},
            learning_rate=config.learning_rate,
            matrix_learning_rate=config.matrix_learning_rate,
            matrix_groups=("encoder",),
            weight_decay=config.weight_decay,
        )

    @property
    def steps(self) -> int:
        return self.config.steps

    def update(self) -> dict[str, float]:
        config = self.config
        self.pool.grow_to(self._first + (self.step + 1) * config.fresh)
        scale_learning_rates(self.optimizers, cosine_schedule(self.step, steps=config.steps, warmup=config.warmup))
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        with crossing("batches"):
            batch = self.pool.sample(config.batch_size, self.generator).to(self.policy.device)
        loss = landmark_loss(self._predict(batch), batch)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, config.max_grad_norm)
        metrics = read_numbers({"landmark_loss": loss, "grad_norm": norm}) | {"scenes": float(self.pool.drawn)}
        suspects = {"optimizer": self.optimizers, "policy weight": self.policy}
        check_metrics(metrics, where="pretraining", batch=batch, suspects=suspects)
        for optimizer in self.optimizers:
            optimizer.step()
        self.step += 1
        return metrics

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Errors on scenes that were never trained on, in the simulator's terms (``PretrainingScenes.errors``)."""
        with crossing("evaluation"):
            predicted = self._predict(self._test.to(self.policy.device)).cpu()
        return self._source.errors(predicted, self._test)

    def _predict(self, scenes: LabeledScenes) -> Float[Tensor, "B landmarks"]:
        encoder, obs = self.compact.encoder, scenes.obs
        with self.policy.autocast():
            encoding = encoder(obs, self.compact.normalizer.normalize_state(obs.state))
        return encoder.landmarks(encoding).float()

    def state_dict(self) -> dict[str, Any]:
        """Without the scenes, which are drawn again."""
        return {
            "step": self.step,
            "drawn": self.pool.drawn,
            "policy": self.policy.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "generator": self.generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]
        self.pool.grow_to(state["drawn"])
        self.policy.load_state_dict(state["policy"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            restore_optimizer(optimizer, saved)
        self.generator.set_state(state["generator"])


def landmark_loss(predicted: Float[Tensor, "B landmarks"], scenes: LabeledScenes) -> Float[Tensor, ""]:
    """Huber loss of the known landmarks, whose low corner makes the last millimeters count."""
    error = F.smooth_l1_loss(predicted, scenes.landmarks, beta=HUBER_CORNER, reduction="none")
    return (error * scenes.known).sum() / scenes.known.sum()


def _with_landmarks(policy: Policy, source: PretrainingScenes) -> HasCompactEncoder:
    if not isinstance(policy, HasCompactEncoder):
        raise UserError(f"policy {policy.config.name} has no compact encoder to pretrain")
    if policy.encoder.config.landmarks != source.num_landmarks:
        raise UserError(
            f"start.policy.encoder.landmarks must be {source.num_landmarks}, what the simulator's scenes have, "
            f"got {policy.encoder.config.landmarks}"
        )
    return policy
