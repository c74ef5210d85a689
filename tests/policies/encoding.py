"""Encoding at the start of an episode, for tests that need a context and no memory."""

from typing import Any

from policies.policy import Policy
from sims.vector_env import Observation


def encode(policy: Policy, obs: Observation) -> Any:
    return policy.encode(obs, policy.initial_state(len(obs)))[0]
