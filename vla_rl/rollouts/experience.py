"""The one record of experience, from the collector to a minibatch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from episodes.schema import POLICY
from sims.devices.crossing import crossing
from sims.tensor_dataclass import TensorDataclass, rows


@dataclass(frozen=True, kw_only=True)
class Experience(TensorDataclass):
    """Action chunks: time-major [T, N] from a collector, flat [B] in an update.

    ``inputs``: what ``Policy.store`` kept of the observation. ``reward`` is discounted within the chunk, whose own
    discount is gamma ** num_executed. ``next_value`` belongs to the chunk's true successor, also where the episode was
    truncated. ``valid`` is False after an episode's end and where the simulator failed: no loss may use such chunks.
    ``actor``: who acted, an index into ``episodes.schema.ACTORS``; ``trace`` and ``log_prob`` are the policy's also
    where it was a person. ``true_success``: the environment's own, where a
    learned reward decides ``success``; nothing learns from it. ``advantage``,
    ``value_target`` and ``weight`` (which averages to one over the batch) are filled by an algorithm,
    ``proximal_log_prob`` and ``behavior_weight`` where older weights acted (vla_rl/algorithms/decoupled.py).
    """

    inputs: TensorDataclass
    trace: TensorDataclass
    log_prob: Float[Tensor, "*B S H A"]
    value: Float[Tensor, "*B"]
    next_value: Float[Tensor, "*B"]
    reward: Float[Tensor, "*B"]
    num_executed: Int[Tensor, "*B"]
    terminated: Bool[Tensor, "*B"]
    truncated: Bool[Tensor, "*B"]
    success: Bool[Tensor, "*B"]
    valid: Bool[Tensor, "*B"]
    task: Int[Tensor, "*B"]
    policy_version: Int[Tensor, "*B"]
    actor: Int[Tensor, "*B"]
    true_success: Bool[Tensor, "*B"] | None = None
    advantage: Float[Tensor, "*B"] | None = None
    value_target: Float[Tensor, "*B"] | None = None
    weight: Float[Tensor, "*B"] | None = None
    proximal_log_prob: Float[Tensor, "*B S H A"] | None = None
    behavior_weight: Float[Tensor, "*B units"] | None = None

    @classmethod
    def side_by_side(cls, parts: Sequence[Experience]) -> Experience:
        """The environments of several [T_i, N_i] as one [T, N], T of the longest; what is added is not valid."""
        longest = max(map(len, parts))

        def join(tensors: list[Tensor]) -> Tensor:
            return torch.cat([_lengthen(tensor, longest) for tensor in tensors], dim=1)

        return cls._combine(parts, join)

    def __getitem__(self, index: Any) -> Experience:
        return self.map(lambda tensor: rows(tensor, index_of(tensor, index)))

    def placed(self, device: torch.device, *, inputs: torch.device) -> Experience:
        """On ``device``, its ``inputs`` on another, such as the host."""
        stored = {id(tensor) for tensor in self.inputs.tensors()}
        return self.map(lambda tensor: tensor.to(inputs if id(tensor) in stored else device))

    def select_envs(self, env_ids: Int[Tensor, " n"]) -> Experience:
        """These environments of [T, N]."""
        return self.map(lambda tensor: tensor[:, index_of(tensor, env_ids)])

    def valid_chunks(self) -> Experience:
        """The valid chunks of [T, N], flat [B]."""
        return self._chunks(self.valid)

    def own_chunks(self) -> Experience:
        """``own`` of [T, N], flat [B]."""
        return self._chunks(self.own)

    def _chunks(self, chosen: Bool[Tensor, "T N"]) -> Experience:
        with crossing("outcomes"):
            index = chosen.flatten().nonzero().flatten()
        return self.map(lambda tensor: tensor.flatten(0, 1))[index]

    @property
    def own(self) -> Bool[Tensor, "*B"]:
        """The valid chunks that the policy acted, and no person."""
        return self.valid & (self.actor == POLICY)

    @property
    def done(self) -> Bool[Tensor, "*B"]:
        return self.terminated | self.truncated

    def success_rate(self) -> float:
        """Of the episodes that ended; NaN if none did."""
        ended = self.done & self.valid
        with crossing("metrics"):
            wins, total = torch.stack([(self.success & ended).sum(), ended.sum()]).tolist()
        return wins / total if total else float("nan")

    def reward_counts(self) -> RewardCounts | None:
        """Of the episodes that ended; None where the environment itself decides success."""
        if self.true_success is None:
            return None
        ended = self.done & self.valid
        true, declared = self.true_success & ended, self.success & ended
        counts = torch.stack([declared.sum(), (declared & ~true).sum(), true.sum(), (true & ~declared).sum()])
        with crossing("metrics"):
            return RewardCounts(*counts.tolist())

    def control_steps(self) -> int:
        with crossing("metrics"):
            return int(torch.where(self.valid, self.num_executed, 0).sum())


@dataclass(frozen=True)
class RewardCounts:
    """Episodes that a learned reward ``declared`` successful, how many of those ``wrongly``; true ones, ``missed``."""

    declared: int
    wrongly: int
    true: int
    missed: int


def reward_errors(parts: Sequence[RewardCounts | None]) -> dict[str, float]:
    """``reward_false_positives``: the share of declared successes that are none; ``reward_false_negatives``: the share
    of true successes that were not declared. NaN where there are none; empty without a learned reward."""
    counts = [part for part in parts if part is not None]
    if not counts:
        return {}
    declared, wrongly, true, missed = (
        sum(getattr(part, name) for part in counts) for name in ("declared", "wrongly", "true", "missed")
    )
    return {
        "reward_false_positives": wrongly / declared if declared else float("nan"),
        "reward_false_negatives": missed / true if true else float("nan"),
    }


def index_of(tensor: Tensor, index: Any) -> Any:
    """``index``, in the host's memory where ``tensor`` is there: prefixes may be, of a rollout on a device."""
    if isinstance(index, Tensor) and tensor.device.type == "cpu" != index.device.type:
        with crossing("prefixes"):
            return index.cpu()
    return index


def clear_invalid(rollout: Experience, valid: Bool[Tensor, "*B"]) -> Experience:
    """``rollout`` with rewards, lengths and outcomes cleared where it is not ``valid``."""
    return dataclasses.replace(
        rollout,
        reward=torch.where(valid, rollout.reward, 0.0),
        num_executed=torch.where(valid, rollout.num_executed, 0),
        terminated=rollout.terminated & valid,
        success=rollout.success & valid,
        valid=valid,
    )


def _lengthen(tensor: Tensor, length: int) -> Tensor:
    """``tensor`` with zeros after its end, to ``length``."""
    if len(tensor) == length:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(length - len(tensor), *tensor.shape[1:])])
