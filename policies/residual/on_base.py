"""What policies that act and learn by another one, their base, have in common."""

from __future__ import annotations

from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor

from policies.device import Precision, make_generator
from policies.normalizer import Normalizer
from policies.policy import C, Policy, T
from sims.tensor_dataclass import TensorDataclass
from sims.vector_env import MIN_INSTRUCTION_BYTES, Observation


class OnBase(Policy[C, T]):
    """Subclasses set ``base``, and compute in single precision themselves."""

    base: Policy[Any, Any]

    @property
    def precision(self) -> Precision:
        """Of the base."""
        return self.base.precision

    @precision.setter
    def precision(self, precision: Precision) -> None:
        self.base.precision = precision


class InBaseContext(OnBase[C, T]):
    """Sees, remembers and stores what its base does, in the base's units."""

    @property
    def normalizer(self) -> Normalizer:
        """Of the base."""
        return cast(Normalizer, self.base.normalizer)

    def fit_normalizer(self, state: Float[Tensor, "N state_dim"], action: Float[Tensor, "M action_dim"]) -> None:
        self.base.fit_normalizer(state, action)

    @property
    def remembers_decisions(self) -> bool:
        return self.base.remembers_decisions

    def initial_state(self, num_envs: int) -> TensorDataclass:
        return self.base.initial_state(num_envs)

    def encode(self, obs: Observation, state: TensorDataclass) -> tuple[Any, TensorDataclass]:
        return self.base.encode(obs, state)

    def remember(self, obs: Observation, state: TensorDataclass) -> TensorDataclass:
        return self.base.remember(obs, state)

    def store(self, context: Any) -> TensorDataclass:
        return self.base.store(context)

    def plan_storage(self, records: int, *, in_host: bool = False) -> None:
        self.base.plan_storage(records, in_host=in_host)

    def stored_on(self, records: int) -> torch.device:
        return self.base.stored_on(records)

    def restore(self, record: TensorDataclass) -> Any:
        return self.base.restore(record)

    def scored_in(self, record: TensorDataclass) -> Precision:
        return self.base.scored_in(record)

    def value_features(self, context: Any) -> Float[Tensor, "B value_dim"]:
        return self.base.value_features(context)


def context_of_zeros(policy: Policy) -> TensorDataclass:
    """Of one observation."""
    robot, device = policy.spec.robot, policy.device
    obs = Observation(
        images=torch.zeros(1, len(robot.cameras), *robot.image_size, 3, dtype=torch.uint8, device=device),
        state=torch.zeros(1, robot.state_dim, device=device),
        instruction=torch.zeros(1, MIN_INSTRUCTION_BYTES, dtype=torch.uint8, device=device),
    )
    context: TensorDataclass = policy.encode(obs, policy.initial_state(1))[0]
    return context


@torch.no_grad()
def acts_without_noise(policy: Policy) -> bool:
    """Whether its chunk is the same whatever the noise."""
    context, generator = context_of_zeros(policy), make_generator(policy.device, 0)
    first, second = (policy.act(context, generator) for _ in range(2))
    return torch.equal(first, second)
