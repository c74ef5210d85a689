"""Exponential moving average of a policy's trained weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from policies.policy import Policy, copy_trained, trained_parameters


class WeightAverage:
    """``policy`` holds the averaged weights and shares everything frozen with the policy that is trained."""

    def __init__(self, policy: Policy, decay: float) -> None:
        self.policy, self.decay, self.updates = copy_trained(policy), decay, 0
        self._parameters: list[Tensor] = list(trained_parameters(self.policy))
        for parameter in self._parameters:
            parameter.requires_grad_(False)

    def follow(self, policy: Policy) -> None:
        """From now on average the parameters that ``policy`` has now, which are in shards; none is deployed here."""
        self.policy = policy
        self._parameters = [parameter.detach().clone() for parameter in trained_parameters(policy)]

    @torch.no_grad()
    def update(self, policy: Policy) -> None:
        """After an optimizer step; the first one copies the weights."""
        newest: list[Tensor] = list(trained_parameters(policy))
        if self.updates == 0:
            for own, new in zip(self._parameters, newest, strict=True):  # once; _foreach_copy_ knows no shards
                own.copy_(new)
        else:
            torch._foreach_lerp_(self._parameters, newest, 1 - self.decay)
        self.updates += 1

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self.updates, "parameters": [parameter.detach() for parameter in self._parameters]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.updates = state["updates"]
        for parameter, saved in zip(self._parameters, state["parameters"], strict=True):
            parameter.copy_(saved)
