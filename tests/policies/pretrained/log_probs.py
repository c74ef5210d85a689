"""Log-probs of a rollout beside what an update computes from the records that the rollout kept."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from policies.policy import Policy, set_frozen
from tests.policies.test_every_policy import generator, observe

FROZEN: dict[str, tuple[str, ...]] = {"kept": ("encoder",), "encoded again": ()}  # what becomes of the prefix


def log_prob_difference(policy: Policy, frozen: Sequence[str]) -> float:
    """[nat] Largest |recomputed - sampled log-prob| of an element of a chunk, after two observations.

    Sampled in one batch and recomputed in shuffled minibatches of one and of many; NaN if one of them is.
    """
    set_frozen(policy, frozen)
    _, memory = policy.encode(observe(6, seed=1), policy.initial_state(6))
    context, _ = policy.encode(observe(6), memory)
    sample = policy.sample(context, generator())
    record = policy.store(context)
    differences = []
    for index in (torch.tensor([3]), torch.tensor([5, 0, 2, 4])):
        log_prob = policy.log_prob(policy.restore(record[index]), sample.trace[index])
        differences.append((log_prob - sample.log_prob[index]).abs().max())
    return torch.stack(differences).max().item()
