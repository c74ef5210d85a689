"""The places where tensors cross between a device and the host, by name.

Whatever moves a tensor, or reads a number of one, does so inside ``crossing(name)``. It costs nothing on a CPU; a
measurement (vla_rl/bench/transfers.py) tells by it which transfers were meant and which slow a GPU down unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, get_args

import torch
from torch import Tensor

Crossing = Literal[
    "observations",  # of an environment on another device than the policy
    "actions",  # to such an environment
    "outcomes",  # rewards and flags of an action chunk; the flags that decide which environments are reset
    "starts",  # of episodes: environment indices, tasks, recorded observations
    "batches",  # of recorded episodes, and of a replay
    "replay",  # experience, to the replay in the host's memory
    "scales",  # of states and actions, measured once
    "noise",  # of imagined episodes, drawn on the host so that an episode does not depend on the device
    "checks",  # whether numbers are finite
    "metrics",  # numbers of losses and rollouts
    "weights",  # into a network or a bundle
    "checkpoint",  # written or read
    "evaluation",  # success and images of evaluated episodes
    "requests",  # of a robot to the policy server, and the answers
    "prompts",  # instructions to the tokenizer, and its tokens
    "prefixes",  # encoded observations that a rollout keeps in the host's memory
]
CROSSINGS: tuple[Crossing, ...] = get_args(Crossing)

_current: ContextVar[Crossing | None] = ContextVar("crossing", default=None)


@contextmanager
def crossing(name: Crossing) -> Iterator[None]:
    """Tensors may cross between devices in this block, for the purpose ``name``."""
    token = _current.set(name)
    try:
        yield
    finally:
        _current.reset(token)


def read_numbers(values: Mapping[str, Tensor]) -> dict[str, float]:
    """Scalars of one type as numbers, in one transfer: the crossing "metrics"."""
    with crossing("metrics"):
        return dict(zip(values, torch.stack([value.detach() for value in values.values()]).tolist(), strict=True))


def current_crossing() -> Crossing | None:
    """The innermost block that is open in this thread."""
    return _current.get()
