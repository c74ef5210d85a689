"""What PPO and GRPO share: a policy, its rollouts, and a clipped update of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Int
from torch import Tensor

from policies.policy import Policy
from sims.devices.crossing import read_numbers
from vla_rl.algorithms.algorithm import Metrics
from vla_rl.rollouts.experience import Experience
from vla_rl.rollouts.sharded import Rollouts


@runtime_checkable
class Update(Protocol):
    """A ClippedUpdate, or what has one in several processes."""

    def run(self, batch: Experience, *, train_policy: bool = True, version: int | None = None) -> Metrics: ...

    def weights(self) -> Mapping[str, Tensor]: ...

    def deployed(self) -> Policy: ...

    def state_dict(self) -> Any:
        """A tree of tensors and numbers, or what a checkpoint has written by several processes (runs/parts.py)."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class OnPolicy:
    """Its ``iterate`` collects, updates and publishes what was learned."""

    def __init__(self, policy: Policy, collector: Rollouts, update: Update) -> None:
        self.policy, self.collector, self.iteration = policy, collector, 0
        self.update: Update = update
        self.publish()

    def publish(self) -> None:
        """Act with the present weights from now on."""
        self.collector.publish(self.iteration, self.update.weights())

    def deployed(self) -> Policy:
        return self.update.deployed()

    def state_dict(self) -> dict[str, Any]:
        return {"iteration": self.iteration, "update": self.update.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.iteration = state["iteration"]
        self.update.load_state_dict(state["update"])
        self.publish()


def ages(age: Int[Tensor, "*B"]) -> Metrics:
    """``age``: by how many updates the weights that acted are older than those that learn from it."""
    return read_numbers({"age_mean": age.float().mean(), "age_max": age.max().float()})
