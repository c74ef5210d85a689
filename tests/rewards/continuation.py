"""What every fit and every environment of a reward must do: go on exactly where it was interrupted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sims.vector_env import VectorEnv
from sims.verification.conformance import same, starts


def check_fit_resumes(make: Callable[[], Any]) -> None:
    """Six updates, and three of it in a second one that is made anew, are the same bit for bit."""
    whole = make()
    expected = [whole.update() for _ in range(6)]
    first = make()
    got = [first.update() for _ in range(3)]
    state = first.state_dict()
    second = make()
    second.load_state_dict(state)
    got += [second.update() for _ in range(3)]
    assert got == expected
    for name, tensor in whole.model.state_dict().items():
        assert torch.equal(second.model.state_dict()[name], tensor), name


def check_episodes_continue(envs: tuple[VectorEnv, VectorEnv], action: Tensor, *, before: int, after: int) -> None:
    """What the first captures after ``before`` steps goes on in the second, which sees and pays the same."""
    first, second = envs
    first.reset(start=starts(first, 3, 4))
    for _ in range(before):
        first.step(action)
    second.reset(start=first.capture())
    same(second.observe(), first.observe())
    for _ in range(after):
        steps = [env.step(action) for env in envs]
        for field in dataclasses.fields(steps[0]):
            values = [getattr(step, field.name) for step in steps]
            assert values[0] is values[1] is None or torch.equal(*values), field.name
        same(second.observe(), first.observe())
