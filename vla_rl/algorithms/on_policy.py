"""What PPO and GRPO share: a policy, its rollouts, and a clipped update of it."""

from __future__ import annotations

from typing import Any

from policies.policy import Policy
from vla_rl.algorithms.clipped_update import ClippedUpdate
from vla_rl.rollouts.sharded import Rollouts


class OnPolicy:
    """Its ``iterate`` collects, updates and publishes what was learned."""

    def __init__(self, policy: Policy, collector: Rollouts, update: ClippedUpdate) -> None:
        self.policy, self.collector, self.update, self.iteration = policy, collector, update, 0
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
